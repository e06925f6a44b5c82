"""A run that was killed and resumed gives the losses of one that was not, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.cli import main
from nextn.errors import NextnError
from nextn.train.export import write_head
from nextn.train.lock import held
from tests.train import runs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    runs.target(folder / "model", "qwen3_5")
    runs.data(folder / "data.jsonl", lines=15, repeat=True)
    runs.data(folder / "eval.jsonl", lines=8, seed=5, repeat=True)
    return folder


@pytest.mark.parametrize(
    ("kills", "save", "seed", "optimizer"),
    [([5], 2, 0, "adamw"), ([1, 3, 1], 1, 3, "adamw"), ([2, 3, 4], 4, 7, "adamw"), ([1, 3], 1, 3, "muon")],
)
def test_losses_are_those_of_an_uninterrupted_run(
    root: Path, tmp_path: Path, kills: list[int], save: int, seed: int, optimizer: str
) -> None:
    """Killed again and again, over the end of the data; evaluations and the final head are the same too."""
    options: dict[str, Any] = {"steps": 8, "save": save, "seed": seed, "eval": str(root / "eval.jsonl")}
    options |= {"eval_every": 4, "eval_draft_tokens": 2, "loss": "lk", "optimizer": optimizer}
    whole = runs.config(root, root / "model", **options, output=str(tmp_path / "whole"))
    parts = runs.config(root, root / "model", **options, output=str(tmp_path / "parts"))
    facts = runs.trainer(whole).run()
    for steps in kills:
        runs.killed_after(steps, parts)
    resumed = runs.trainer(parts).run()
    assert runs.losses(parts) == runs.losses(whole)
    assert runs.evaluations(parts) == runs.evaluations(whole)
    heads = [(Path(c.output) / "model.safetensors").read_bytes() for c in (whole, parts)]
    assert heads[0] == heads[1]
    for key in ("steps", "tokens", "loss", "before", "after", "best_step", "data"):
        assert resumed[key] == facts[key]


def test_a_real_kill(root: Path) -> None:
    """SIGKILL in the middle of the command; the same command goes on."""
    made = runs.config(root, root / "model", steps=400, save=5, output=str(root / "killed"), keep=1)
    words = [f"{k}={v}" for k, v in made.model_dump(exclude_none=True).items() if k not in ("data", "resume")]
    command = [sys.executable, "-m", "nextn.cli", "train", f"data={made.data[0]}", *words]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    log = Path(made.output) / "logs" / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and len(log.read_text().splitlines()) > 12) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = runs.trainer(made)
    begun = resumed.step.done
    assert begun >= 10
    assert begun % 5 == 0
    for _ in range(4):
        resumed._one_step(None)
    whole = runs.config(root, root / "model", steps=400, save=400, output=str(root / "same"))
    straight = runs.trainer(whole)
    for _ in range(begun + 4):
        straight._one_step(None)
    assert straight.tally.loss == resumed.tally.loss
    assert [p.name for p in (Path(made.output) / "checkpoints").glob("step-*")] == [f"step-{begun}"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_a_checkpoint(root: Path, tmp_path: Path, number: int, code: int) -> None:
    made = runs.config(root, root / "model", steps=4000, save=4000, output=str(tmp_path / "head"))
    words = [f"{k}={v}" for k, v in made.model_dump(exclude_none=True).items() if k not in ("data", "resume")]
    command = [sys.executable, "-m", "nextn.cli", "train", f"data={made.data[0]}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    log = Path(made.output) / "logs" / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and len(log.read_text().splitlines()) > 5) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    done = runs.trainer(made).step.done
    assert done > 5
    assert f"stopped after step {done}; the same command goes on from there" in said
    assert len(runs.losses(made)) == done


def test_checkpoints_kept(root: Path) -> None:
    made = runs.config(root, root / "model", steps=7, save=2, keep=2, output=str(root / "kept"))
    runs.trainer(made).run()
    assert sorted(p.name for p in (root / "kept" / "checkpoints").iterdir()) == ["step-6", "step-7"]


def test_the_best_head_outlives_the_checkpoints_around_it(root: Path) -> None:
    """Kept while later steps come and go, and replaced when it is beaten; a rate that ruins makes an early one best."""
    options: dict[str, Any] = {"eval": str(root / "eval.jsonl"), "eval_every": 1, "save": 1, "keep": 1}
    made = runs.config(
        root, root / "model", **options, steps=9, lr=1.0, warmup=0, schedule="constant", output=str(root / "best")
    )
    facts = runs.trainer(made).run()
    found = runs.evaluations(made)
    best = max((s for s in found if s), key=lambda s: found[s])
    assert facts["exported_step"] == best
    assert best < 8
    folders = sorted(p.name for p in (root / "best" / "checkpoints").iterdir())
    assert folders == [f"best-{best}", "step-9"]


def test_a_run_without_a_head_yet_is_named_as_such(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command that is pointed at it, before its first checkpoint, after it, and inside of the folder."""
    out, model = tmp_path / "run", str(root / "model")
    made = runs.config(root, root / "model", output=str(out), save=2)
    said = f"{out} is the folder of a run of `nextn train` that has exported no head."
    for steps in (1, 3):
        runs.killed_after(steps, made)
        assert any(out.glob("checkpoints/step-*")) == (steps == 3)
        for words in (
            ["inspect", str(out)],
            ["generate", model, "--head", str(out), "--prompt-ids", "1"],
            ["eval", model, "--head", str(out), "--data", str(root / "eval.jsonl")],
            ["merge", model, str(out), str(tmp_path / "merged"), "--replace"],
        ):
            with pytest.raises(SystemExit) as ended:
                main(words)
            assert ended.value.code == 2
            what, how = capsys.readouterr().err.splitlines()
            assert said in what
            assert "Run its command again" in how
    for inside in (out / "checkpoints", *out.glob("checkpoints/*")):
        with pytest.raises(NextnError, match="resumes from") as error:
            open_checkpoint(inside)
        assert f"{out}: its head is there once the run has ended" in str(error.value)
    with pytest.raises(NextnError, match="neither config"):
        open_checkpoint(tmp_path)
    runs.trainer(made).run()
    assert open_checkpoint(out).tensors


def test_a_finished_run_started_again_tells_of_its_data(root: Path, tmp_path: Path) -> None:
    """As it did when it ran, malformed lines included; also where it was killed behind its last checkpoint."""
    lines = (root / "data.jsonl").read_text()
    (tmp_path / "data.jsonl").write_text("{not json\n" + lines + '{"input_ids": [1, 500]}\n')
    made = runs.config(tmp_path, root / "model", steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nextn.train.trainer.Trainer._finish", lambda self: self.source.report())
        read: Any = runs.trainer(made).run()
    assert read["lines"] == 17
    assert sum(read["malformed"].values()) == len(read["examples"]) == 2
    for _ in range(2):
        facts = runs.trainer(made).run()
        assert facts["steps"] == 3
        assert facts["data"] == read
    longer = runs.trainer(runs.config(tmp_path, root / "model", steps=40)).run()
    assert longer["data"] == read


def test_a_head_without_checkpoints_is_not_replaced_without_a_word(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = runs.config(root, root / "model", steps=2, output=str(tmp_path / "head"))
    words = [f"{k}={json.dumps(v)}" for k, v in made.model_dump(exclude_none=True).items()]
    for told in (False, True):
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
        assert ended.value.code == 0
        assert ("begins anew: of the run before no checkpoint is left" in capsys.readouterr().err) == told
        shutil.rmtree(tmp_path / "head" / "checkpoints")


def test_longer_than_planned(root: Path) -> None:
    """More steps may be asked for later; with a constant rate that is the longer run."""
    options: dict[str, Any] = {"schedule": "constant", "warmup": 0}
    runs.trainer(runs.config(root, root / "model", **options, steps=3, output=str(root / "longer"))).run()
    longer = runs.config(root, root / "model", **options, steps=6, output=str(root / "longer"))
    runs.trainer(longer).run()
    whole = runs.config(root, root / "model", **options, steps=6, output=str(root / "long"))
    runs.trainer(whole).run()
    assert runs.losses(longer) == runs.losses(whole)


def test_refuses_another_runs_output(root: Path) -> None:
    options: dict[str, Any] = {"steps": 2, "output": str(root / "taken")}
    runs.trainer(runs.config(root, root / "model", **options)).run()
    with pytest.raises(NextnError, match=r"another lr \(0.01, now 0.02\)"):
        runs.trainer(runs.config(root, root / "model", **options, lr=0.02))
    with pytest.raises(NextnError, match="resume is false"):
        runs.trainer(runs.config(root, root / "model", **options, resume=False))
    with pytest.raises(NextnError, match="holds a run of 2 steps, more than steps = 1"):
        runs.trainer(runs.config(root, root / "model", **{**options, "steps": 1}))
    done = runs.trainer(runs.config(root, root / "model", **options)).run()
    assert done["steps"] == 2


def test_one_process_at_a_time_trains_into_an_output(root: Path) -> None:
    made = runs.config(root, root / "model", steps=2, output=str(root / "shared"))
    with held(root / "shared" / "logs"), pytest.raises(NextnError, match="Another process is training into"):
        runs.trainer(made).run()
    assert not (root / "shared" / "checkpoints").exists()
    assert runs.trainer(made).run()["steps"] == 2


def test_a_full_disk_loses_nothing(root: Path) -> None:
    options: dict[str, Any] = {"save": 2, "output": str(root / "full")}
    runs.trainer(runs.config(root, root / "model", **options, steps=2)).run()
    kept = sorted(p.name for p in (root / "full" / "checkpoints").iterdir())
    longer = runs.config(root, root / "model", **options, steps=4)
    whole = runs.trainer(longer)
    with runs.files_of_at_most(10_000), pytest.raises(NextnError, match=r"step-4 cannot be written \(File too large\)"):
        whole.run()
    assert sorted(p.name for p in (root / "full" / "checkpoints").iterdir()) == kept == ["step-2"]
    assert runs.trainer(longer).run()["steps"] == 4


def test_a_head_that_does_not_fit_on_the_disk_leaves_the_one_before(root: Path) -> None:
    out = root / "full-head"
    made = runs.trainer(runs.config(root, root / "model", steps=2, output=str(out)))
    made.run()
    before = (out / "model.safetensors").read_bytes()
    with (
        runs.files_of_at_most(10_000),
        pytest.raises(NextnError, match=r"model.safetensors cannot be written \(.*File too large"),
    ):
        write_head(made.begun, out, first=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert not list(out.glob(".*"))


def test_a_run_keeps_to_its_ids(root: Path, tmp_path: Path) -> None:
    """Another list under the same path would change the losses."""
    (tmp_path / "ids.json").write_text('{"ids": [3, 5, 7]}')
    options: dict[str, Any] = {"draft_vocab": str(tmp_path / "ids.json"), "output": str(tmp_path / "head")}
    runs.trainer(runs.config(root, root / "model", steps=2, **options)).run()
    (tmp_path / "ids.json").write_text('{"ids": [3, 5, 8]}')
    with pytest.raises(NextnError, match="drafts from other ids"):
        runs.trainer(runs.config(root, root / "model", steps=3, **options))
    (tmp_path / "ids.json").write_text('{"ids": [7, 5, 3]}')
    assert runs.trainer(runs.config(root, root / "model", steps=3, **options)).step.done == 2
