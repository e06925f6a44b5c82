"""What `benchmarks.train_smollm2` is made of: questions kept apart, and the attention that is wrong on purpose."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import train_smollm2
from benchmarks.smollm2_prompts import plain, write_prompts
from benchmarks.smollm2_speed import prompts
from nextn.train import step
from nextn.train.layout import Layout
from nextn.train.unroll import head_unroll, target_states
from tests.train.packs import packed, random_documents
from tests.train.test_unroll import CausalContext, decoder

ASKED = "Can you tell me how the moon number {} moves around the planet?"


def talk(name: str, *questions: str) -> dict[str, Any]:
    turns = [t for q in questions for t in ({"from": "human", "value": q}, {"from": "gpt", "value": "It does. " * 20})]
    return {"id": name, "conversations": turns}


def read(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line)["messages"][0]["content"] for line in file]


def test_questions_are_kept_apart(tmp_path: Path) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    asked = [ASKED.format(word) for word in words]
    talks = [talk(f"c{n}_0", asked[n], asked[n + 5], asked[n].upper() + "!!") for n in range(5)]
    talks.append(talk("late_3", ASKED.format("eleven")))
    text = json.dumps(talks)
    (tmp_path / "cut.json").write_text(text[:-90])
    counts = write_prompts(tmp_path / "cut.json", tmp_path / "a.gz", tmp_path / "b.gz", 100, 2)
    taught, held = read(tmp_path / "a.gz"), read(tmp_path / "b.gz")
    assert counts == {"found": 10, "train": 6, "held_out": 2}
    # Held out are first questions, and nothing of their conversations is taught.
    numbers = [asked.index(question) for question in held]
    assert all(number < 5 for number in numbers)
    apart = {number + shift for number in numbers for shift in (0, 5)}
    assert {asked.index(question) for question in taught} == set(range(10)) - apart


@pytest.mark.parametrize(
    "question",
    ["Why?", "def f(x): return sorted(x) ; print(f(y)) ; import numpy, torch, scipy", "Почему небо голубое " * 3],
)
def test_what_is_not_asked(question: str) -> None:
    assert plain(question) is None
    assert plain(ASKED.format("one")) == "can you tell me how the moon number one moves around the planet"


@torch.no_grad()
def test_the_wrong_attention_is_the_known_one() -> None:
    model = decoder("llama")
    batch = packed(random_documents((20, 13)), padding=4)
    layout = Layout(batch.documents)
    states = target_states(model, batch, layout)
    outs = [
        head_unroll(model)(model, kind(layout, batch.positions), batch.ids, states.given, 3)
        for kind in (train_smollm2.CausalContext, CausalContext)
    ]
    real = batch.documents[0] >= 0
    assert all(torch.allclose(a[:, real], b[:, real], atol=1e-10) for a, b in zip(*outs, strict=True))


def test_the_switch_is_put_back() -> None:
    right = step.UnrollContext
    inside = []
    with contextlib.suppress(KeyError), train_smollm2.causal(True):
        inside.append(step.UnrollContext)
        raise KeyError
    assert (inside, step.UnrollContext) == ([train_smollm2.CausalContext], right)


def test_prompts_are_spread_over_the_file(tmp_path: Path) -> None:
    rows = [{"input_ids": [n, 7, 8], "loss_mask": [0, 0, 1]} for n in range(10)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [p[0] for p in prompts(tmp_path / "answers.jsonl", 4)] == [0, 2, 5, 7]
    assert prompts(tmp_path / "answers.jsonl", 99) == [[n, 7] for n in range(10)]
