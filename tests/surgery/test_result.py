"""A merge's result is held to the rules of inspect before it is written, and to what an engine asked for can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.inspect.examine import examine
from nextn.surgery.merge import MergeOptions, plan_merge
from nextn.surgery.plan import Plan
from nextn.surgery.result import listed
from nextn.surgery.write import write as carry_out
from tests.fixtures import HEAD_SHARD, TRUNK_SHARD, Folder, checkpoint
from tests.surgery.builder import head_of, headless, read, tiny_qwen3_5, tiny_qwen3_next, trunk_of, write

FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def in_fp8(folder: Folder, listed: list[str]) -> Folder:
    """The head's projections in FP8 with a scale a block, as publishers store them."""
    folder.config["quantization_config"] = {**FP8, "modules_to_not_convert": listed}
    for key, (_, shape) in list(folder.head.items()):
        if key.endswith("_proj.weight"):
            folder.head[key] = ("F8_E4M3", shape)
            folder.head[f"{key}_scale_inv"] = ("F32", tuple(-(-n // 128) for n in shape))
    return folder


def errors(root: Path) -> list[str]:
    return [f.code for f in examine(open_checkpoint(root)).findings if f.severity == "error"]


def merge(tmp_path: Path, base: Folder, donor: Folder, **options: Any) -> Plan:
    write(base, tmp_path / "base", 1)
    write(donor, tmp_path / "donor", 2)
    opened = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "donor")
    plan = plan_merge(*opened, tmp_path / "out", MergeOptions(**options))
    carry_out(plan)
    return plan


HEAD_LINEARS = [k.removesuffix(".weight") for k, (_, s) in checkpoint(tiny_qwen3_5()).head.items() if len(s) == 2]


@pytest.mark.parametrize(
    "exempted, kept",
    [
        (["lm_head"], 7),
        (["lm_head", "mtp"], 0),
        (["lm_head", *HEAD_LINEARS], 0),
        (["lm_head", "mtp.layers.0.self_attn.k_proj"], 4),
        (["lm_head", "mtp.layers.0.mlp.down_proj"], 6),
    ],
)
def test_an_fp8_head_is_kept_only_as_far_as_the_base_does_not_exempt_it(
    tmp_path: Path, exempted: list[str], kept: int
) -> None:
    """What is exempted is written in full precision, and with it all that engines fuse it with."""
    base = headless(tiny_qwen3_5())
    base.config["quantization_config"] = {**FP8, "modules_to_not_convert": exempted}
    merge(tmp_path, base, in_fp8(checkpoint(tiny_qwen3_5()), ["lm_head", "mtp.fc"]))
    head = head_of(read(tmp_path / "out"))
    fp8 = {k for k, (dtype, _, _) in head.items() if dtype == "F8_E4M3"}
    assert len(fp8) == kept
    assert {k for k in head if "scale" in k} == {f"{k}_scale_inv" for k in fp8}
    assert errors(tmp_path / "out") == []
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "mtp.fc" in declared["modules_to_not_convert"] or "mtp" in exempted
    assert not {k.removesuffix(".weight") for k in fp8} & set(declared["modules_to_not_convert"])


def test_the_planned_result_is_listed_as_it_is_then_written(tmp_path: Path) -> None:
    base = checkpoint(tiny_qwen3_5())
    moved = list(base.head)[:4]
    base.shards[TRUNK_SHARD] |= {k: base.head.pop(k) for k in moved}
    plan = merge(tmp_path, base, in_fp8(checkpoint(tiny_qwen3_5()), []), replace=True)
    planned = listed(plan, open_checkpoint(tmp_path / "base"), {TRUNK_SHARD: TRUNK_SHARD})
    found = open_checkpoint(tmp_path / "out")
    assert (planned.config, planned.index, planned.files) == (found.config, found.index, found.files)
    seen = {k: (t.dtype, t.shape, t.file, t.nbytes) for k, t in found.tensors.items()}
    assert {k: (t.dtype, t.shape, t.file, t.nbytes) for k, t in planned.tensors.items()} == seen
    assert not planned.misplaced


def test_a_result_with_an_error_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a merge that keeps FP8 whatever the base's list says, as it once did."""
    monkeypatch.setattr("nextn.surgery.merge._keeping", lambda base, head: lambda module: True)
    base = headless(tiny_qwen3_5())
    base.config["quantization_config"] = {**FP8, "modules_to_not_convert": ["mtp"]}
    with pytest.raises(NextnError, match="quant-exempt-quantised"):
        merge(tmp_path, base, in_fp8(checkpoint(tiny_qwen3_5()), ["mtp.fc"]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("replacing", [False, True])
def test_a_lone_model_safetensors_is_renamed_though_an_index_names_it(tmp_path: Path, replacing: bool) -> None:
    """transformers reads a file of that name alone and never looks at the index."""
    folder = checkpoint(tiny_qwen3_5()) if replacing else headless(tiny_qwen3_5())
    body = folder.shards.pop(TRUNK_SHARD) | folder.shards.pop(HEAD_SHARD)
    folder.shards = {"model.safetensors": body}
    folder.index = dict.fromkeys(body, "model.safetensors")
    merge(tmp_path, folder, checkpoint(tiny_qwen3_5()), replace=replacing)
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == [TRUNK_SHARD, HEAD_SHARD]
    found = {**trunk_of(read(tmp_path / "base")), **head_of(read(tmp_path / "donor"))}
    assert read(tmp_path / "out") == found
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(found)


def test_what_an_engine_will_do_is_said_and_refused_where_it_was_named(tmp_path: Path) -> None:
    """SGLang builds Qwen3-Next's head as model.layers.0, which no AWQ entry can name without sparing the target's."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"]}
    base = headless(tiny_qwen3_next())
    base.config["quantization_config"] = awq
    plan = merge(tmp_path, base, checkpoint(tiny_qwen3_next()))
    (note,) = [n for n in plan.notes if n.startswith("SGLang")]
    assert "fails (quant-runtime-name)" in note
    assert "KeyError" in note
    opened = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "donor")
    with pytest.raises(NextnError, match="SGLang .* would fail on the result: KeyError"):
        plan_merge(*opened, tmp_path / "other", MergeOptions(engine="sglang"))
    assert plan_merge(*opened, tmp_path / "other", MergeOptions(engine="vllm")).head.pieces


def test_storage_that_the_engine_cannot_read_is_refused(tmp_path: Path) -> None:
    write(headless(tiny_qwen3_next()), tmp_path / "base", 1)
    write(checkpoint(tiny_qwen3_next()), tmp_path / "donor", 2)
    opened = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "donor")
    with pytest.raises(NextnError, match=r"SGLang .* would fail on the result: KeyError: .*experts\.gate_up_proj"):
        plan_merge(*opened, tmp_path / "out", MergeOptions(experts="grouped", engine="sglang"))
    assert plan_merge(*opened, tmp_path / "out", MergeOptions(experts="split", engine="sglang")).notes == ()
