"""`nextn demo`: the story, its table, and what it says as JSON."""

from __future__ import annotations

import json

import pytest

from nextn.cli import main
from nextn.engine.demo import PROMPTS


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--max-tokens", "24", *arguments])
    assert (ended.value.code or 0) == 0
    return capsys.readouterr().out


def test_story(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys)
    assert out.startswith("Qwen3.5 dense: a complete MTP head (15 of 15 tensors")
    assert all(prompt in out for prompt in PROMPTS)
    table = out[out.index("With the head against without it") :]
    assert table.count("yes") == len(PROMPTS) + 1
    assert "no " not in table
    lines = table.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line[16:] for line in lines), "a figure is cut off"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = json.loads(run(capsys, "--json", "--prompt", "class A:", "--prompt", "def f(x):", "-k", "2"))
    assert out["identical"] is True
    assert [p["prompt"] for p in out["prompts"]] == ["class A:", "def f(x):"]
    assert out["rounds"] == sum(p["rounds"] for p in out["prompts"])
    accepted = sum(p["rounds"] * (p["accept_length"] - 1) for p in out["prompts"])
    assert out["accept_length"] == pytest.approx(1 + accepted / out["rounds"])
    assert sum(out["acceptance"]) == pytest.approx(out["accept_length"] - 1)
