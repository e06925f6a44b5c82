"""SGLang's own head classes, on a CPU: what merge writes loads whole, what is missing is found, the maths is ours.

Deselected by default; `make test-engines` makes the environment: SGLang without its compiled kernels. What stands in
for what is printed by `nextn verify --engine sglang` and asserted here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.facts import gather
from nextn.surgery.merge import MergeOptions, plan_merge
from nextn.surgery.write import write as carry_out
from nextn.verify.engine import LoadCheck, check_load
from tests.engines import reference
from tests.fixtures import checkpoint
from tests.surgery.builder import (
    headless,
    read,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_next,
    write,
)

pytestmark = pytest.mark.engines
PYTHON = os.environ.get("NEXTN_ENGINES_PYTHON", str(Path(__file__).parents[2] / ".venv-engines" / "bin" / "python"))
ROWS = 9


def tiny_mimo() -> dict[str, Any]:
    return {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "dtype": "bfloat16",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "attention_bias": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
    }


MIMO_CODE = """from transformers.models.qwen2.configuration_qwen2 import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
"""transformers has no such model type; the publisher ships the class with the weights."""


CASES: dict[str, tuple[dict[str, Any], str, Callable[..., Any]]] = {
    "qwen3_5": (tiny_qwen3_5(), "Qwen3_5ForCausalLMMTP", reference.qwen_head),
    "qwen3_5_moe": (tiny_qwen3_5_moe(), "Qwen3_5ForCausalLMMTP", reference.qwen_head),
    "qwen3_next": (tiny_qwen3_next(), "Qwen3NextForCausalLMMTP", reference.qwen_head),
    "mimo": (tiny_mimo(), "MiMoMTP", reference.mimo_head),
}


@pytest.fixture(scope="module")
def python() -> str:
    assert Path(PYTHON).exists(), "run `make test-engines`, which makes the environment"
    return PYTHON


def merged(config: dict[str, Any], root: Path, *, donor_experts: str = "split", **options: Any) -> Path:
    """A head merged into a base that lost its own; experts in the donor as asked."""
    write(checkpoint(config, experts=donor_experts), root / "donor", 2)
    (root / "base").mkdir()
    (root / "base" / "configuration_mimo.py").write_text(MIMO_CODE)
    base = write(headless(config), root / "base", 1)
    opened = open_checkpoint(base), open_checkpoint(root / "donor")
    carry_out(plan_merge(*opened, root / "out", MergeOptions(**options)))
    return root / "out"


def values(root: Path) -> dict[str, Any]:
    """All tensors in float64. They are stored in bf16."""
    out = {}
    for key, (dtype, shape, raw) in read(root).items():
        assert dtype == "BF16"
        wide = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        out[key] = wide.astype(np.float64).reshape(shape)
    return out


def rows_for(weights: dict[str, Any], folder: Path) -> tuple[Path, dict[str, Any]]:
    random = np.random.default_rng(3)
    hidden = next(v.shape[1] for k, v in weights.items() if k.endswith("embed_tokens.weight"))
    embed = next(v for k, v in weights.items() if k.endswith("embed_tokens.weight"))
    rows = {
        "ids": random.integers(0, len(embed), ROWS),
        "hidden": random.standard_normal((ROWS, hidden)).astype(np.float32),
        "positions": np.arange(ROWS),
        "embed": embed.astype(np.float32),
        "head": weights.get("lm_head.weight", embed).astype(np.float32),
    }
    np.savez(folder / "rows.npz", **rows)
    return folder / "rows.npz", rows


def load(root: Path, python: str, rows: Path | None = None) -> LoadCheck:
    return check_load(gather(open_checkpoint(root)), "sglang", python, rows)


@pytest.mark.parametrize("name", CASES)
def test_a_merged_head_loads_whole_and_computes_what_the_reference_does(tmp_path: Path, python: str, name: str) -> None:
    config, model_class, maths = CASES[name]
    root = merged(config, tmp_path)
    weights = values(root)
    path, rows = rows_for(weights, tmp_path)
    found = load(root, python, path)
    assert found.status == "passed", found.detail
    assert (found.model_class, found.survivors, found.warnings) == (model_class, (), ())
    assert found.version == "0.5.23"
    assert set(found.stubs) <= {"torchvision", "tvm_ffi", "vllm"}
    assert all("embed_tokens" in p or "lm_head" in p for p in found.from_target)
    logits = np.load(f"{path}.logits.npz")["logits"]
    wide = {k: rows[k].astype(np.float64) for k in ("embed", "head", "hidden")}
    expected = maths(weights, config, wide["embed"], wide["head"], rows["ids"], wide["hidden"], rows["positions"])
    assert logits.shape == expected.shape == (ROWS, 64)
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_nextn_s_own_head_computes_what_sglang_s_does(tmp_path: Path, python: str, name: str) -> None:
    import torch

    from nextn.models.context import SequenceContext
    from nextn.models.load import load_drafter

    root = merged(CASES[name][0], tmp_path)
    path, rows = rows_for(values(root), tmp_path)
    assert load(root, python, path).status == "passed"
    logits = np.load(f"{path}.logits.npz")["logits"]
    model, _ = load_drafter(open_checkpoint(root), dtype=torch.float32, device=torch.device("cpu"))
    positions = torch.from_numpy(rows["positions"])[None]
    with torch.no_grad():
        out, _ = model.head_forward(
            torch.from_numpy(rows["ids"])[None], torch.from_numpy(rows["hidden"])[None], SequenceContext(positions)
        )
        ours = model.logits(out)[0].numpy()
    assert np.abs(logits - ours).max() < 2e-5 * np.abs(ours).max()


@pytest.mark.parametrize(
    "name, lost, parameter",
    [
        ("qwen3_5", "mtp.fc.weight", "fc.weight"),
        ("qwen3_5", "mtp.layers.0.self_attn.k_proj.weight", "model.layers.0.qkv_proj.weight"),
        ("qwen3_5_moe", "mtp.layers.0.mlp.experts.2.down_proj.weight", "model.layers.0.mlp.experts.w2_weight"),
        ("qwen3_next", "mtp.pre_fc_norm_hidden.weight", "pre_fc_norm_hidden.weight"),
        ("mimo", "model.mtp_layers.0.input_proj.weight", "model.input_proj.weight"),
    ],
)
def test_a_missing_tensor_is_found_though_sglang_says_nothing(
    tmp_path: Path, python: str, name: str, lost: str, parameter: str
) -> None:
    folder = checkpoint(CASES[name][0])
    folder.drop(lambda k: k == lost)
    write(folder, tmp_path / "partial", 1)
    (tmp_path / "partial" / "configuration_mimo.py").write_text(MIMO_CODE)
    found = load(tmp_path / "partial", python)
    assert found.status == "failed"
    assert [(s.parameter, s.keys) for s in found.survivors] == [(parameter, (lost,))]
    assert 0 < found.survivors[0].share <= 1


def test_a_head_left_under_a_vision_language_prefix_is_skipped_and_a_merge_mends_it(
    tmp_path: Path, python: str
) -> None:
    config = tiny_qwen3_5()
    root = write(checkpoint(config, prefix="model.language_model."), tmp_path / "prefixed", 1)
    found = load(root, python)
    assert found.status == "failed"
    assert "fc.weight" in [s.parameter for s in found.survivors]
    opened = open_checkpoint(root), open_checkpoint(root)
    carry_out(plan_merge(*opened, tmp_path / "out", MergeOptions(replace=True)))
    assert load(tmp_path / "out", python).status == "passed"


def test_stacked_experts_break_qwen3_next_and_merge_splits_them(tmp_path: Path, python: str) -> None:
    config = tiny_qwen3_next()
    found = load(write(checkpoint(config, experts="grouped"), tmp_path / "grouped", 1), python)
    assert found.status == "failed"
    assert "KeyError" in found.detail
    assert load(merged(config, tmp_path / "m", donor_experts="grouped"), python).status == "passed"


def test_an_exempted_head_in_a_quantised_base_loads_and_an_unexempted_one_does_not(tmp_path: Path, python: str) -> None:
    config = tiny_qwen3_5()
    declared = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    write(checkpoint(config), tmp_path / "donor", 2)
    folder = headless(config)
    folder.config["quantization_config"] = declared
    base = write(folder, tmp_path / "base", 1)
    opened = open_checkpoint(base), open_checkpoint(tmp_path / "donor")
    carry_out(plan_merge(*opened, tmp_path / "out", MergeOptions()))
    found = load(tmp_path / "out", python)
    assert found.status == "passed", found.detail
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    raw["quantization_config"] = declared
    (tmp_path / "out" / "config.json").write_text(json.dumps(raw))
    assert load(tmp_path / "out", python).status != "passed"
