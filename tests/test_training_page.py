"""The figures in docs/train.md are those of the result files, and a changed figure is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import write_training


def test_the_page_is_current() -> None:
    text = write_training.PAGE.read_text()
    assert write_training.page(text) == text


def test_a_figure_that_is_not_the_results_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in write_training.BLOCKS:
        (tmp_path / f"{name}.json").write_text((write_training.RESULTS / f"{name}.json").read_text())
    record = json.loads((tmp_path / "stale-head.json").read_text())
    record["rows"][-1]["dialogue"]["accept_length"] += 0.5
    (tmp_path / "stale-head.json").write_text(json.dumps(record))
    monkeypatch.setattr(write_training, "RESULTS", tmp_path)
    text = write_training.PAGE.read_text()
    changed = write_training.page(text)
    assert changed != text
    assert f"{record['rows'][-1]['dialogue']['accept_length']:.2f}" in changed


def test_the_head_recovers() -> None:
    """What the page shows: on the text that the target went to, training gives more than the stale head."""
    record = json.loads((write_training.RESULTS / "stale-head.json").read_text())
    _, stale, trained = (row["dialogue"]["accept_length"] for row in record["rows"])
    assert trained > stale + 0.2


def test_the_optimisers_are_compared_with_their_rates() -> None:
    """The page says at which rates AdamW and Muon ran, as recorded, beside the figures that it compares."""
    record = json.loads((write_training.RESULTS / "train-smollm2.json").read_text())
    rows = {row["variant"]: row for row in record["rows"]}
    adamw, muon = rows["adamw"], rows["kl, own text"]
    assert (adamw["optimizer"], muon["optimizer"]) == ("adamw", "muon")
    text = " ".join(write_training.PAGE.read_text().split())
    assert f"AdamW ran at lr {adamw['lr']:g}, Muon at {muon['lr']:g} (`shipped`: {rows['shipped']['lr']:g})." in text
    assert f"the {muon['accept_length'] - adamw['accept_length']:.2f} between `adamw` and `kl, own text`" in text
