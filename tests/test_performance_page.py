"""docs/performance.md says what the result files hold: which targets are met, and nothing that was not measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import write_performance
from benchmarks.targets import TARGETS, ratio, target

SCRIPT = write_performance.ROOT / "benchmarks" / "write_performance.py"
Record = dict[str, Any]

BASE: Record = {
    "geometry": "4b", "batch": 1, "draft_tokens": 3, "context": 1024, "draft_vocab": None,
    "step_ms": 2.4, "step_floor_ms": 2.0, "step_ratio": 1.2, "round_ms": 3.9, "round_floor_ms": 3.0, "round_ratio": 1.3,
    "break_even_accept_length": 1.625, "peak_memory_gb": 9.876, "peak_memory_other_gb": 0.012,
}  # fmt: skip


def row(**fields: Any) -> Record:
    return {**BASE, **fields}


def new_row(**fields: Any) -> Record:
    """A row as decode.py writes it with --full, at batch 1."""
    own = {
        "separate_draft_round_ms": 3.95, "separate_draft_peak_memory_gb": 11.234,
        "separate_draft_peak_memory_other_gb": 0.034, "separate_draft_extra_gb": 1.358,
        "generate_step_ms": 2.711, "generate_round_ms": 4.222, "generate_accept_length": 1.04, "generate_tokens": 256,
        "generate_step_tokens_per_s": 301.4, "generate_round_tokens_per_s": 207.6,
    }  # fmt: skip
    return row(**(own | fields))


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the project's records, from which the page is made."""
    for path in write_performance.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(write_performance, "RESULTS", tmp_path)
    return tmp_path


def changed(records: Path, name: str, **fields: Any) -> str:
    """The page after some fields of a record were replaced."""
    record = json.loads((records / name).read_text()) | fields
    (records / name).write_text(json.dumps(record))
    return write_performance.page()


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_the_page_is_current() -> None:
    ran = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_ratios_are_rounded_once() -> None:
    nine = row(geometry="9b", step_ms=4.3512, step_floor_ms=3.7687, step_ratio=1.155)
    assert cells(write_performance.floors({"rows": [nine]}))[2][6] == "1.15 (1.30 / 1.15)"
    assert "aims missed: 4b round" not in "\n".join(write_performance.verdict({"rows": [nine]}))
    assert "9b step (1.155, aim 1.15)" in write_performance.verdict({"rows": [nine]})[2]


def test_the_verdict_is_that_of_the_rows() -> None:
    rows = [
        row(step_ms=2.4, step_floor_ms=2.0, round_ms=4.6, round_floor_ms=3.0),
        row(geometry="0.8b", step_ms=0.7, step_floor_ms=0.35, round_ms=1.6, round_floor_ms=1.0),
        row(batch=8, step_ms=99.0),
        row(draft_vocab=32768, round_ms=99.0),
    ]
    assert write_performance.verdict({"rows": rows}) == [
        "- above what they must be: 4b round (1.533, must 1.50)",
        "- aims reached: 4b step (1.200, aim 1.25) and 0.8b round (1.600, aim 1.60)",
        "- aims missed: 4b round (1.533, aim 1.25) and 0.8b step (2.000, aim 1.80)",
    ]


def test_every_target_of_the_record_is_in_the_verdict() -> None:
    rows = write_performance.result("decode-h200.json")["rows"]
    text = "\n".join(write_performance.verdict({"rows": rows})[1:])
    for geometry, goals in TARGETS.items():
        for what, goal in goals.items():
            held = next(r for r in rows if r["geometry"] == geometry and target(r, what) is not None)
            line = next(line for line in text.splitlines() if f"{geometry} {what} (" in line)
            assert line.startswith("- aims reached") == (ratio(held, what) <= goal.aim)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (6.0, "2 of 2 cells. The 0.8b round at batch 1 is 4.00 times as fast (to reach: 3, met)."),
        (3.0, "2 of 2 cells. The 0.8b round at batch 1 is 2.00 times as fast (to reach: 3, missed)."),
        (1.5, "1 of 2 cells; not in 0.8b round at batch 1. The 0.8b round at batch 1 is 1.00 times as fast"),
    ],
)
def test_what_is_said_beside_sglang(theirs: float, words: str) -> None:
    assert words in write_performance.quicker([("0.8b", 1, "step", 1.0, 1.1), ("0.8b", 1, "round", 1.5, theirs)])


def test_what_is_timed_of_either_engine_is_said(records: Path) -> None:
    text = " ".join(write_performance.page().split())
    assert "executor's loop, without scheduler, stops and text; SGLang's are those of its whole offline engine" in text


def test_peaks_of_memory() -> None:
    measured = new_row()
    assert cells(write_performance.floors({"rows": [measured]}))[2][-1] == "9.9"
    lines = write_performance.separate_draft([measured, new_row(batch=8, peak_memory_other_gb=0.2)])
    assert cells(lines)[2] == ["4b", "1", "3.900", "3.950", "9.88", "11.23", "1.36"]
    assert "and at most 0.20 GB." in lines
    assert write_performance.separate_draft([row()]) == []


def test_the_whole_product_where_it_was_measured() -> None:
    lines = write_performance.product({"rows": [new_row(), row(batch=8)]})
    assert cells(lines)[2:] == [["4b", "1", "3", "2.400", "2.711", "3.900", "4.222", "1.04", "301", "208"]]
    assert "1,024 tokens" in " ".join(lines)
    assert "256 greedy tokens" in " ".join(lines)
    assert write_performance.product({"rows": [row()]}) == []


def test_programs_of_the_delta_step_in_use_beside_those_of_few_heads() -> None:
    times = {"32x4": 6.04, "32x1": 5.59, "64x2": 5.41}
    lines = write_performance.delta_programs(
        {"rows": [{"geometry": "4b", "batch": 32, "rows": 4, "in_use": "32x1", "forward_ms": times}]}
    )
    assert cells(lines)[2:] == [["4b", "32", "4", "6.040", "32 x 1", "5.590", "5.410"]]


def test_start_up_says_what_was_done() -> None:
    times = {"start_up_cold_s": 11.7, "start_up_warm_s": 0.7, "prompt_tokens": 1024}
    text = " ".join(write_performance.start_up({"start_up": {"4b": times}}))
    assert "a prompt of 1,024 tokens and a round" in text
    assert "under 20: met" in text
    assert "| 4b | 11.7 | 0.7 |" in text
    slow = {"4b": times, "9b": {**times, "start_up_warm_s": 20.0}}
    assert "under 20: missed" in " ".join(write_performance.start_up({"start_up": slow}))
    assert write_performance.start_up({"start_up": {}}) == []


def test_the_page_follows_its_records(records: Path) -> None:
    apart = json.loads((records / "divergence-h200.json").read_text())
    rows = [{**r, "batch": 77} for r in apart["rows"]]
    assert "| embedded | 77 |" in changed(records, "divergence-h200.json", rows=rows)


def test_sampling_is_over_the_greedy_row_before_it() -> None:
    rows = [
        {"geometry": "4b", "batch": b, "sampling": kind, "step_ms": step, "round_ms": 2 * step}
        for b, kind, step in ((1, "greedy", 2.0), (1, "warm", 3.0), (8, "greedy", 4.0), (8, "warm", 5.0))
    ]
    assert [line[4] for line in cells(write_performance.sampling({"rows": rows}))[2:]] == [
        "1.00",
        "1.50",
        "1.00",
        "1.25",
    ]
