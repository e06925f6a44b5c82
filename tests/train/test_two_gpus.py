"""On two GPUs: NCCL and FSDP2 take the steps of one GPU, and go on from each other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.train import runs
from tests.train.test_distributed import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
EXACT: dict[str, Any] = {"device": "cuda", "autocast": "off", "target_dtype": "float32", "accumulation": 2}


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_two_take_the_steps_of_one(tmp_path: Path, kind: str) -> None:
    """Losses to 1e-5 in float32, the head as well, the same evaluation; also where two go on from one's checkpoint."""
    model = runs.target(tmp_path / "model", kind)
    runs.data(tmp_path / "data.jsonl", repeat=True)
    runs.data(tmp_path / "eval.jsonl", lines=8, seed=5, repeat=True)
    options = {
        **EXACT,
        "eval": str(tmp_path / "eval.jsonl"),
        "eval_every": 3,
        "eval_draft_tokens": 2,
        "save": 3,
        "keep_best": False,
        "schedule": "constant",
    }

    def made(name: str, **changes: Any) -> Any:
        return runs.config(tmp_path, model, output=str(tmp_path / name), **{**options, **changes})

    alone, pair, parts = made("alone"), made("pair"), made("parts")
    launch(alone, 1)
    launch(pair, 2)
    launch(made("parts", steps=3), 1)
    launch(parts, 2)
    expected = runs.losses(alone)
    for one in (pair, parts):
        found = runs.losses(one)
        assert len(found) == len(expected) == 6
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5
        mine, theirs = (load_file(Path(c.output) / "model.safetensors") for c in (one, alone))
        assert mine.keys() == theirs.keys()
        assert max(float((mine[k].float() - theirs[k].float()).abs().max()) for k in theirs) < 1e-3
    assert runs.evaluations(pair)[3] == pytest.approx(runs.evaluations(alone)[3], abs=1e-3)


def test_two_in_bfloat16_follow_one(tmp_path: Path) -> None:
    """As it is used on GPUs: a bfloat16 target, bfloat16 arithmetic, embedding and output head one sharded tensor."""
    model = runs.target(tmp_path / "model", "qwen3_5", tied=True)
    runs.data(tmp_path / "data.jsonl", repeat=True)
    usual: dict[str, Any] = {"device": "cuda", "accumulation": 2, "target_dtype": "bfloat16"}
    found = []
    for world in (1, 2):
        made = runs.config(tmp_path, model, output=str(tmp_path / f"head-{world}"), **usual)
        launch(made, world)
        found.append(runs.losses(made))
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_two_follow_one_with_muon(tmp_path: Path) -> None:
    """A matrix's update is made of all its shards; its iteration runs in bfloat16, so that losses part a little."""
    model = runs.target(tmp_path / "model", "qwen3_5")
    runs.data(tmp_path / "data.jsonl", repeat=True)
    found = []
    for world in (1, 2):
        made = runs.config(tmp_path, model, output=str(tmp_path / f"head-{world}"), **EXACT, optimizer="muon")
        launch(made, world)
        found.append(runs.losses(made))
    assert len(found[1]) == 6
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[1][-1] < found[1][0]
