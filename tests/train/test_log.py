"""A run's log: the same values in log.jsonl, TensorBoard and Weights & Biases, and a refusal where that is missing."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from nextn.errors import NextnError
from nextn.train.config import TrainConfig
from nextn.train.lock import held
from tests.train import runs

STUB = """
from pathlib import Path
import fcntl
import json

FILE = Path(__file__).with_name("calls.jsonl")


def _note(name, **values):
    with FILE.open("a") as file:
        file.write(json.dumps({"call": name, **values}) + "\\n")


class Run:
    def log(self, values, step):
        _note("log", values=values, step=step)

    def finish(self):
        _note("finish")


def init(**options):
    _note("init", **options)
    return Run()
"""
"""As much of wandb's interface as a run uses: https://docs.wandb.ai/ref/python/."""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module named wandb that writes down how it is called."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "wandb.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path / "stub")
    sys.modules.pop("wandb", None)
    yield tmp_path / "stub" / "calls.jsonl"
    sys.modules.pop("wandb", None)


def made(root: Path, **values: Any) -> TrainConfig:
    runs.target(root / "model", "qwen3")
    runs.data(root / "data.jsonl", repeat=True)
    runs.data(root / "eval.jsonl", lines=8, seed=5, repeat=True)
    options: dict[str, Any] = {"eval": str(root / "eval.jsonl"), "eval_every": 2, "steps": 4, "keep_best": False}
    return runs.config(root, root / "model", **options, **values)


def flat(records: list[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """What log.jsonl holds, as names and values of curves."""
    out: list[tuple[int, dict[str, float]]] = []
    for r in records:
        if "eval" in r:
            shares = {f"eval/acceptance_{i}": v for i, v in enumerate(r["eval"]["acceptance"], 1)}
            out.append((r["step"], {"eval/accept_length": r["eval"]["accept_length"], **shares}))
        else:
            parts = {f"train/loss_step_{k}": v for k, v in enumerate(r["loss_by_step"], 1)}
            names = ("loss", "lr", "tokens_per_second")
            out.append((r["step"], {**{f"train/{n}": r[n] for n in names}, **parts}))
    return out


def test_weights_and_biases_get_every_value(tmp_path: Path, calls: Path) -> None:
    run = made(tmp_path, wandb="heads")
    runs.trainer(run).run()
    noted = [json.loads(line) for line in calls.read_text().splitlines()]
    first, *middle, last = noted
    folder = Path(run.output) / "logs"
    name = (folder / "wandb-id").read_text()
    asked = {"project": "heads", "dir": str(folder), "config": run.model_dump(), "id": name, "resume": "allow"}
    assert first == {"call": "init", **asked}
    assert last == {"call": "finish"}
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [(n["step"], n["values"]) for n in middle] == flat(records)
    assert [n["step"] for n in middle] == [0, 1, 2, 2, 3, 4, 4]


def test_a_resumed_run_goes_on_as_the_same_one(tmp_path: Path, calls: Path) -> None:
    """A second run of its own has another id."""
    run = made(tmp_path, wandb="heads", save=2)
    runs.trainer(run).run()
    runs.trainer(runs.config(tmp_path, tmp_path / "model", steps=6, save=2, wandb="heads")).run()
    runs.trainer(runs.config(tmp_path, tmp_path / "model", output=str(tmp_path / "b"), wandb="heads")).run()
    begun = [n["id"] for n in map(json.loads, calls.read_text().splitlines()) if n["call"] == "init"]
    assert begun[0] == begun[1] != begun[2]


def test_tensorboard_gets_every_value(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = made(tmp_path)
    runs.trainer(run).run()
    folder = Path(run.output) / "logs"
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found = {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}
    wanted = {(name, step): value for step, values in flat(records) for name, value in values.items()}
    assert found == {key: pytest.approx(value, rel=1e-6) for key, value in wanted.items()}


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    """Before any step, and with exit code 2."""
    run = made(tmp_path, wandb="heads")
    with pytest.raises(NextnError, match="wandb is asked for and not installed") as error:
        runs.trainer(run).run()
    assert error.value.exit_code == 2
    assert not Path(run.output).exists()


def test_a_refusal_in_the_first_step_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the evaluation before it, which is in the log once a step is taken."""
    run = made(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("nextn.train.step.clip_grad_norm_", lambda *given: torch.tensor(float("nan")))
        with pytest.raises(NextnError, match="not finite at step 1"):
            runs.trainer(run).run()
    assert not Path(run.output).exists()
    runs.trainer(run).run()
    assert list(runs.evaluations(run)) == [0, 2, 4]


def test_a_finished_run_started_again_drops_records_past_its_end(tmp_path: Path) -> None:
    """Those of steps that a killed run took behind its last checkpoint."""
    run = made(tmp_path)
    runs.trainer(run).run()
    log = Path(run.output) / "logs" / "log.jsonl"
    whole = log.read_text()
    with log.open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n')
    runs.trainer(run).run()
    assert log.read_text() == whole


def test_a_lock_that_its_holder_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened while another held it, removed, then locked: another process would make and hold a file of its own."""
    calls = []
    flock = fcntl.flock

    def late(file: Any, how: int) -> None:
        if not calls:
            (tmp_path / "logs" / "lock").unlink()
        calls.append(how)
        flock(file, how)

    monkeypatch.setattr("nextn.train.lock.fcntl.flock", late)
    with held(tmp_path / "logs"):
        assert len(calls) == 2
        with pytest.raises(NextnError, match="Another process"), held(tmp_path / "logs"):
            pass
    assert not (tmp_path / "logs").exists()
