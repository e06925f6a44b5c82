"""A checkpoint that is damaged, or cannot be read, is told in a sentence that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from nextn import cli
from nextn.errors import NextnError
from tests.train import runs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    runs.target(folder / "model", "qwen3_5")
    runs.data(folder / "data.jsonl", lines=15, repeat=True)
    runs.data(folder / "eval.jsonl", lines=8, seed=5, repeat=True)
    return folder


@pytest.mark.parametrize("damage", ["lost", "empty", "cut", "other"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "run.json"])
def test_a_damaged_checkpoint_is_named(
    root: Path, tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence, with the one before to resume from; without that one, the run begins anew."""
    options: dict[str, Any] = {"save": 2, "output": str(tmp_path / "head")}
    runs.trainer(runs.config(root, root / "model", steps=4, **options)).run()
    folder = tmp_path / "head" / "checkpoints"
    whole = (folder / "step-4" / name).read_bytes()
    if damage == "lost":
        (folder / "step-4" / name).unlink()
    else:
        left = {"empty": b"", "cut": whole[: len(whole) // 2], "other": b'{"a": 1}'}[damage]
        (folder / "step-4" / name).write_bytes(left)
    longer = runs.config(root, root / "model", steps=6, **options)
    words = [f"{k}={json.dumps(v)}" for k, v in longer.model_dump(exclude_none=True).items()]
    for before, fix in (("step-2", "resume from step-2"), (None, "begin anew")):
        if before is None:
            shutil.rmtree(folder / "step-2")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", *words])
        assert ended.value.code == 2
        said = capsys.readouterr().err.splitlines()
        assert said[-2:] == [
            f"error: The checkpoint {folder}/step-4 cannot be read: a file of it is missing, cut short or overwritten.",
            f"       Delete it to {fix}, or give another output.",
        ]
        assert not [line for line in said if "Traceback" in line or "CheckpointException" in line]
    shutil.rmtree(folder / "step-4")
    assert runs.trainer(longer).step.done == 0


def test_a_damaged_best_head_is_named(root: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval": str(root / "eval.jsonl"), "eval_every": 1, "save": 1, "keep": 1, "steps": 9}
    options |= {"lr": 1.0, "warmup": 0, "schedule": "constant", "output": str(tmp_path / "head")}
    best = runs.trainer(runs.config(root, root / "model", **options)).run()["exported_step"]
    (tmp_path / "head" / "checkpoints" / f"best-{best}" / "__0_0.distcp").unlink()
    with pytest.raises(NextnError, match=rf"best-{best} cannot be read: .*with keep_best=false exports the last"):
        runs.trainer(runs.config(root, root / "model", **options)).run()
    assert runs.trainer(runs.config(root, root / "model", **options, keep_best=False)).run()["exported_step"] == 9


@pytest.mark.parametrize(
    ("error", "raised", "match"),
    [
        (PermissionError(13, "Permission denied"), NextnError, r"\(Permission denied\). Check the disk"),
        (torch.OutOfMemoryError("no room"), torch.OutOfMemoryError, "no room"),
    ],
)
def test_a_checkpoint_that_is_whole_is_not_called_damaged(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type, match: str
) -> None:
    made = runs.config(root, root / "model", steps=2, output=str(tmp_path / "head"))
    runs.trainer(made).run()

    def failing(*given: Any, **options: Any) -> None:
        raise CheckpointException("load", {0: (error, None)})  # type: ignore[dict-item]

    monkeypatch.setattr("nextn.train.checkpoints.load", failing)
    with pytest.raises(raised, match=match):
        runs.trainer(made)
