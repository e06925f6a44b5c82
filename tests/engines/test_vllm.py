"""vLLM's own head classes, on a CPU: a merged head loads whole, and what is missing is found under both its names.

vLLM's wheel is for GPUs; its classes build without its kernels, on its CPU platform. Set NEXTN_VLLM_PYTHON to a Python
with vLLM 0.33.0 to run these.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.facts import gather
from nextn.verify.engine import LoadCheck, check_load
from tests.engines.test_sglang import CASES, merged
from tests.fixtures import checkpoint
from tests.surgery.builder import write

PYTHON = os.environ.get("NEXTN_VLLM_PYTHON", "")
pytestmark = [pytest.mark.engines, pytest.mark.skipif(not PYTHON, reason="NEXTN_VLLM_PYTHON names no Python")]


def load(root: Path) -> LoadCheck:
    return check_load(gather(open_checkpoint(root)), "vllm", PYTHON)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_merged_head_loads_whole(tmp_path: Path, name: str) -> None:
    found = load(merged(CASES[name][0], tmp_path))
    assert found.status == "passed", found.detail
    assert found.survivors == ()
    assert all(p.endswith(("embed_tokens.weight", "lm_head.weight")) for p in found.from_target)


def test_a_missing_tensor_is_found_under_both_its_names(tmp_path: Path) -> None:
    folder = checkpoint(CASES["qwen3_5"][0])
    folder.drop(lambda k: k == "mtp.pre_fc_norm_hidden.weight")
    found = load(write(folder, tmp_path / "partial", 1))
    assert found.status == "failed"
    assert [(s.parameter, s.keys) for s in found.survivors] == [
        ("model.pre_fc_norm_hidden.weight", ("mtp.pre_fc_norm_hidden.weight",))
    ]


def test_a_head_under_a_vision_language_prefix_is_skipped(tmp_path: Path) -> None:
    root = write(checkpoint(CASES["qwen3_5"][0], prefix="model.language_model."), tmp_path / "prefixed", 1)
    found = load(root)
    assert found.status == "failed"
    assert "model.fc.weight" in [s.parameter for s in found.survivors]
