"""A reduced draft vocabulary changes what is drafted, never what comes out; and where its ids come from."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn import generate, load
from nextn.assets import embedded_model
from nextn.cli import main
from nextn.engine.draft_vocab import DraftVocab, first_ids, frequent_ids, read_ids
from nextn.engine.engine import Engine
from nextn.engine.runner import PlainRunner
from nextn.errors import NextnError
from recipes.tiny.order import token_order
from tests.engine.models import decode, decoder
from tests.engine.test_distribution import SEEDS, SIGNIFICANCE, VOCAB, draw, exact, p_value

CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.1, "repetition_penalty": 1.5, "frequency_penalty": 0.4, "logit_bias": {2: 1.5}},
]


@pytest.mark.parametrize("ids", [[1, 4, 6, 9], [3]], ids=len)
@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(o))
def test_sampled_tokens_keep_the_law(options: dict[str, Any], ids: list[int]) -> None:
    model = decoder("qwen3_5", torch.float32, VOCAB)
    counts, accept_length = draw(model, 2, options, ids)
    assert p_value(counts, exact(model, options), SEEDS) > SIGNIFICANCE
    assert accept_length > 1.01


@settings(max_examples=25)
@given(
    kind=st.sampled_from(("qwen3_5", "qwen3")),
    prompts=st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=9), min_size=1, max_size=3),
    ids=st.sets(st.integers(0, 10), min_size=1),
    k=st.integers(1, 5),
    penalty=st.sampled_from((0.0, 0.5)),
    least=st.integers(0, 6),
)
def test_greedy_tokens_stay(
    kind: str, prompts: list[list[int]], ids: set[int], k: int, penalty: float, least: int
) -> None:
    model = decoder(kind, vocab=11)
    options: dict[str, Any] = {"max_tokens": 10, "frequency_penalty": penalty, "min_tokens": least}
    options["stop_token_ids"] = [min(ids)]
    off = decode(Engine(model, draft_tokens=0), prompts, **options)
    on = decode(Engine(model, draft_tokens=k, draft_vocab=ids), prompts, **options)
    assert [s.tokens for s in on] == [s.tokens for s in off]
    # Where min_tokens holds back the only id, a draft token has no meaning.
    if len(ids) > 1 or not least:
        assert {d for s in on for r in s.rounds for d in r.drafts} <= ids


def test_logits_are_those_of_the_full_projection() -> None:
    model = decoder("qwen3_5", vocab=97)
    ids = [90, 3, 40, 3]
    vocab = DraftVocab.gather(model, ids)
    hidden = torch.randn(2, 1, model.config.hidden, dtype=torch.float64)
    full = model.logits(hidden)
    reduced = PlainRunner(model, model, vocab).draft_logits(hidden)
    assert vocab.weight.shape == (3, model.config.hidden)
    kept = torch.zeros(97, dtype=torch.bool)
    kept[ids] = True
    torch.testing.assert_close(reduced[..., kept], full[..., kept], rtol=1e-12, atol=1e-12)
    assert bool((reduced[..., ~kept] == -torch.inf).all())


def test_all_ids_draft_like_none_left_out() -> None:
    model = decoder("qwen3_5", vocab=97)
    full = decode(Engine(model, draft_tokens=3), [[1, 2, 3]])
    same = decode(Engine(model, draft_tokens=3, draft_vocab=range(97)), [[1, 2, 3]])
    assert [s.rounds for s in full] == [s.rounds for s in same]


@given(
    text=st.lists(st.integers(0, 19), max_size=60),
    always=st.lists(st.integers(0, 19), max_size=3, unique=True),
    count=st.integers(3, 20),
)
def test_most_frequent(text: list[int], always: list[int], count: int) -> None:
    chosen = frequent_ids(text, count, always=always, vocab=20)
    counts = Counter(text)
    assert len(set(chosen)) == len(chosen) == count
    assert set(always) <= set(chosen)
    inside = [counts[i] for i in chosen if i not in always]
    outside = [counts[i] for i in range(20) if i not in chosen]
    assert not inside or not outside or min(inside) >= max(outside)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=80))
def test_token_order_is_by_count_and_complete(ids: list[int]) -> None:
    order = token_order(np.array(ids), 31)
    counts = Counter(ids)
    assert sorted(order) == list(range(31))
    assert all((-counts[a], a) < (-counts[b], b) for a, b in itertools.pairwise(order))


def test_the_embedded_order_covers_its_vocabulary() -> None:
    folder = embedded_model()
    order = read_ids(folder / "token_order.json")
    assert sorted(order) == list(range(json.loads((folder / "config.json").read_text())["vocab_size"]))


@pytest.mark.parametrize("text", ["[3, 1, 4]", "3 1 4", "3,1,4\n", "3\n1\n4\n"])
def test_files_of_ids(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    assert read_ids(path) == [3, 1, 4]
    path.write_text('{"ids": [3, 1, 4]}')
    assert read_ids(path) == [1, 3, 4]


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_text("a: 1")
    with pytest.raises(NextnError, match="something else"):
        read_ids(path)
    path.write_text('{"a": 1}')
    with pytest.raises(NextnError, match="lists no token ids"):
        read_ids(path)
    with pytest.raises(NextnError, match="cannot be read"):
        read_ids(tmp_path / "none")
    model = decoder("qwen3", vocab=11)
    for ids, said in (([], "empty"), ([11], "id 11"), ([-1], "id -1")):
        with pytest.raises(NextnError, match=said):
            Engine(model, draft_vocab=ids)
    for count in (0, 1, 12):
        with pytest.raises(NextnError, match=f"vocabulary of {count} does not fit"):
            first_ids([], count, always=[1, 2], vocab=11)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--prompt", "def main():", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    text = tmp_path / "text.py"
    text.write_text("import os\n\nfor name in os.listdir():\n    print(name)\n" * 20)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(0, 4096, 2))))
    common = ["--max-tokens", "40", "--temperature", "0", "--dtype", "float64", "--json"]
    plain = json.loads(command(capsys, *common, "--no-mtp")[1])
    accepted = []
    for options in (
        ["--draft-vocab", "4096"],
        ["--draft-vocab", "600"],
        ["--draft-vocab", "40", "--draft-vocab-text", str(text)],
        ["--draft-vocab", str(ids)],
    ):
        result = json.loads(command(capsys, *common, *options)[1])
        assert result["tokens"] == plain["tokens"]
        accepted.append(result["accept_length"])
    assert accepted[0] >= accepted[1] > 1
    for options, said in (
        (["--no-mtp", "--draft-vocab", "5"], "--no-mtp contradicts"),
        (["--draft-vocab-text", str(text)], "how many"),
        (["--draft-vocab", "40", "--draft-vocab-text", str(empty)], "empty.txt is empty"),
        (["--draft-vocab", str(ids), "--draft-vocab-text", str(text)], "how many"),
        (["--draft-vocab", "5000"], "does not fit"),
        (["--draft-vocab", "nowhere.json"], "'nowhere.json', which is neither a count nor a file"),
    ):
        code, _, err = command(capsys, *options)
        assert code == 2
        assert said in err


def test_api_counts_for_itself() -> None:
    model = load()
    plain = generate(model, "class Queue:", max_tokens=24, draft_tokens=0)
    reduced = generate(model, "class Queue:", max_tokens=24, draft_vocab=800)
    assert reduced.tokens == plain.tokens
    drafted = {d for r in reduced.draft_rounds for d in r.drafts}
    assert drafted <= set(read_ids(embedded_model() / "token_order.json")[:800]) | set(model.defaults.eos_ids)
    first = torch.arange(800)
    assert generate(model, "class Queue:", max_tokens=24, draft_vocab=first).draft_rounds == (
        generate(model, "class Queue:", max_tokens=24, draft_vocab=first.tolist()).draft_rounds
    )
