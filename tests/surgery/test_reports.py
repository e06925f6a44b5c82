"""Field reports 4 to 6 and 13 to 17: what practitioners lost heads by, each with a clean control beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.inspect.examine import examine
from nextn.surgery.extract import plan_extract
from nextn.surgery.merge import MergeOptions, plan_merge
from nextn.surgery.plan import Plan
from nextn.surgery.write import write as carry_out
from tests.fixtures import HEAD_SHARD, TRUNK_SHARD, checkpoint
from tests.surgery import schemes
from tests.surgery.builder import (
    head_of,
    headless,
    read,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    trunk_of,
    write,
)

FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def merge(base: Path, head: Path, out: Path, **options: Any) -> Plan:
    plan = plan_merge(open_checkpoint(base), open_checkpoint(head), out, MergeOptions(**options))
    carry_out(plan)
    return plan


def errors(root: Path) -> set[str]:
    """Codes of the findings of severity error of a checkpoint."""
    return {f.code for f in examine(open_checkpoint(root)).findings if f.severity == "error"}


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", ""])
def test_4_a_head_under_vision_language_prefixes_is_the_same_head(tmp_path: Path, prefix: str) -> None:
    """Engines look for bare ``mtp.`` names: what was saved under a prefix comes back without it. "" is the control."""
    base = write(headless(tiny_qwen3_5()), tmp_path / "base", 1)
    donor = write(checkpoint(tiny_qwen3_5(), prefix=prefix), tmp_path / "donor", 2)
    plan = merge(base, donor, tmp_path / "out")
    assert len(plan.head.pieces) == 15
    assert len(plan.renamed) == (15 if prefix else 0)
    out = read(tmp_path / "out")
    assert head_of(out) == {k.removeprefix(prefix): v for k, v in head_of(read(donor)).items()}
    assert errors(tmp_path / "out") == set()


def test_5_a_graft_into_an_int4_folder_is_exempted_and_into_a_full_one_changes_no_list(tmp_path: Path) -> None:
    donor = write(checkpoint(tiny_qwen3_5()), tmp_path / "donor", 2)
    folder = headless(tiny_qwen3_5())
    folder.config["quantization_config"] = schemes.declarations()["auto-round"][0]
    packed = {
        f"model.language_model.layers.0.mlp.down_proj.{part}": entry
        for part, entry in {
            "qweight": ("I32", (6, 32)),
            "qzeros": ("I32", (1, 4)),
            "scales": ("BF16", (1, 32)),
        }.items()
    }
    folder.shards[TRUNK_SHARD] |= packed
    merge(write(folder, tmp_path / "int4", 1), donor, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for module in schemes.runtime_modules(False):
        assert schemes.exempted("auto-round", config, None, module) == {"both": True}
    assert schemes.exempted("auto-round", config, None, "model.layers.0.mlp.down_proj") == {"both": False}
    assert "quant-unlisted" not in errors(tmp_path / "out")

    control = write(headless(tiny_qwen3_5()), tmp_path / "full", 1)
    assert merge(control, donor, tmp_path / "clean").edits == ()
    assert errors(tmp_path / "clean") == set()


def test_6_the_hashes_tell_a_trained_head_from_the_one_it_started_from(tmp_path: Path) -> None:
    donor = write(checkpoint(tiny_qwen3_5()), tmp_path / "donor", 2)
    other = write(checkpoint(tiny_qwen3_5()), tmp_path / "trained", 3)
    for source, name in ((donor, "a"), (donor, "b"), (other, "c")):
        carry_out(plan_extract(open_checkpoint(source), tmp_path / name))
    marks = [
        next(line for line in (tmp_path / n / "README.md").read_text().splitlines() if "sha256 of the head" in line)
        for n in "abc"
    ]
    assert marks[0] == marks[1] != marks[2]
    base = write(headless(tiny_qwen3_5()), tmp_path / "base", 1)
    merge(base, tmp_path / "a", tmp_path / "same")
    merge(base, tmp_path / "c", tmp_path / "different")
    assert head_of(read(tmp_path / "same")) == head_of(read(donor))
    assert head_of(read(tmp_path / "different")) != head_of(read(donor))


def _fp8(folder: Any, head: bool) -> Any:
    """A folder whose linears (the head's too where `head`) are FP8 with a scale a block."""
    folder.config["quantization_config"] = dict(FP8)
    if head:
        for key, (_, shape) in list(folder.head.items()):
            if len(shape) == 2 and key != "mtp.fc.weight":
                folder.head[key] = ("F8_E4M3", shape)
                folder.head[f"{key}_scale_inv"] = ("F32", (1, 1))
        folder.config["quantization_config"]["modules_to_not_convert"] = ["mtp.fc"]
    return folder


def test_13_scales_that_lost_their_weights_are_dropped(tmp_path: Path) -> None:
    donor = write(checkpoint(tiny_qwen3_5()), tmp_path / "donor", 2)
    folder = _fp8(headless(tiny_qwen3_5()), head=False)
    stale = [f"mtp.layers.0.self_attn.{p}_proj.weight_scale_inv" for p in "qkvo"]
    folder.shards[TRUNK_SHARD] |= dict.fromkeys(stale, ("F32", (1, 1)))
    base = write(folder, tmp_path / "base", 1)
    plan = merge(base, donor, tmp_path / "out")
    assert set(plan.rewritten[TRUNK_SHARD]) == set(stale)
    assert head_of(read(tmp_path / "out")) == head_of(read(donor))
    assert trunk_of(read(tmp_path / "out")) == trunk_of(read(base))
    assert not {"scales-stale", "quant-unlisted"} & errors(tmp_path / "out")

    # The same left by a tool that grafted without looking: the report names it, a merge with --replace mends it.
    grafted = _fp8(checkpoint(tiny_qwen3_5()), head=False)
    grafted.head[stale[0]] = ("F32", (1, 1))
    write(grafted, tmp_path / "grafted", 4)
    assert "scales-stale" in errors(tmp_path / "grafted")
    plan = merge(tmp_path / "grafted", tmp_path / "grafted", tmp_path / "mended", replace=True)
    assert list(plan.left_out) == [stale[0]]
    assert not {"scales-stale", "quant-unlisted"} & errors(tmp_path / "mended")

    clean = write(_fp8(headless(tiny_qwen3_5()), head=False), tmp_path / "clean", 1)
    assert merge(clean, donor, tmp_path / "out2").rewritten == {}


def test_13_an_fp8_head_stays_fp8_in_a_base_of_its_scheme_and_is_widened_elsewhere(tmp_path: Path) -> None:
    import numpy as np
    import torch

    donor = write(_fp8(checkpoint(tiny_qwen3_5()), head=True), tmp_path / "donor", 2)
    same = write(_fp8(headless(tiny_qwen3_5()), head=False), tmp_path / "same", 1)
    plan = merge(same, donor, tmp_path / "out")
    assert head_of(read(tmp_path / "out")) == head_of(read(donor))
    listed = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert listed == ["mtp.fc"]
    carry_out(plan_extract(open_checkpoint(tmp_path / "out"), tmp_path / "head"))
    assert read(tmp_path / "head") == head_of(read(donor))
    assert json.loads((tmp_path / "head" / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"

    full = write(headless(tiny_qwen3_5()), tmp_path / "full", 1)
    plan = merge(full, donor, tmp_path / "wide")
    wide, source = head_of(read(tmp_path / "wide")), head_of(read(donor))
    assert {t[0] for t in wide.values()} == {"BF16"}
    assert len(wide) == 15
    key = "mtp.layers.0.mlp.up_proj.weight"
    assert key + "_scale_inv" in plan.left_out
    values = torch.frombuffer(bytearray(source[key][2]), dtype=torch.float8_e4m3fn).float()
    scale = float(np.frombuffer(source[key + "_scale_inv"][2], "<f4")[0])
    got = torch.frombuffer(bytearray(wide[key][2]), dtype=torch.bfloat16)
    assert torch.equal(got, (values * scale).bfloat16())


def test_13_packed_heads_are_refused_outside_their_scheme(tmp_path: Path) -> None:
    folder = checkpoint(tiny_qwen3_5())
    folder.config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    del folder.head["mtp.layers.0.mlp.up_proj.weight"]
    packed: dict[str, Any] = {
        f"mtp.layers.0.mlp.up_proj.{part}": entry
        for part, entry in {"qweight": ("I32", (4, 48)), "scales": ("F16", (1, 48)), "qzeros": ("I32", (1, 6))}.items()
    }
    folder.head.update(packed)
    donor = write(folder, tmp_path / "donor", 2)
    base = write(headless(tiny_qwen3_5()), tmp_path / "base", 1)
    with pytest.raises(NextnError, match=r"up_proj.qweight is stored as I32 \(int4\)"):
        merge(base, donor, tmp_path / "out")


@pytest.mark.parametrize("experts", ["grouped", "split"])
def test_14_grouped_experts_come_over_whole_and_half_of_them_are_refused(tmp_path: Path, experts: str) -> None:
    """Both layouts are read; "split" is the control."""
    config = tiny_qwen3_5_moe(experts=4)
    base = write(headless(config), tmp_path / "base", 1)
    donor = write(checkpoint(config, experts=experts), tmp_path / "donor", 2)
    plan = merge(base, donor, tmp_path / "out")
    assert len(plan.head.pieces) == (19 if experts == "grouped" else 17 + 3 * 4)
    assert head_of(read(tmp_path / "out")) == head_of(read(donor))
    half = checkpoint(config, experts=experts)
    half.drop(lambda k: ".experts." in k and "down_proj" in k)
    write(half, tmp_path / "half", 3)
    with pytest.raises(NextnError, match="partial"):
        merge(base, tmp_path / "half", tmp_path / "no")


def test_experts_stored_both_ways_are_refused(tmp_path: Path) -> None:
    config = tiny_qwen3_5_moe(experts=4)
    donor = write(checkpoint(config, experts="split"), tmp_path / "donor", 2)
    stacked = write(checkpoint(config, experts="grouped"), tmp_path / "stacked", 2)
    (stacked / HEAD_SHARD).rename(donor / "more.safetensors")
    with pytest.raises(NextnError, match="holds its experts twice"):
        plan_extract(open_checkpoint(donor), tmp_path / "out")


def test_15_copies_of_shared_tensors_are_neither_needed_nor_taken(tmp_path: Path) -> None:
    """GLM-4.5 ships copies of the embedding and the output head, 4.6 (the control) does not: both merge to the same."""
    config = glm(False)
    base = write(headless(config), tmp_path / "base", 1)
    four_five = write(checkpoint(config, copies=True), tmp_path / "4.5", 2)
    four_six = write(checkpoint(config), tmp_path / "4.6", 2)
    copied = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert copied <= set(read(four_five))
    assert set(merge(base, four_five, tmp_path / "a").left_out) == copied
    assert merge(base, four_six, tmp_path / "b").left_out == {}
    assert read(tmp_path / "a").keys() == read(tmp_path / "b").keys() == {*read(base), *read(four_six)} - copied
    assert errors(tmp_path / "a") == errors(tmp_path / "b") == set()


def glm(nested: bool) -> dict[str, Any]:
    """config.json of a small GLM-4 MoE, of itself or as the text part of a vision-language model."""
    config: dict[str, Any] = {
        "model_type": "glm4_moe",
        "hidden_size": 32,
        "vocab_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
    }
    if nested:
        return {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "text_config": config}
    return {**config, "architectures": ["Glm4MoeForCausalLM"]}


def test_15_a_head_that_counts_on_from_nested_layers_goes_where_they_are(tmp_path: Path) -> None:
    donor = write(checkpoint(glm(False)), tmp_path / "donor", 2)
    folder = headless(glm(True))
    base = write(folder, tmp_path / "base", 1)
    assert any(k.startswith("model.language_model.layers.0.") for k in read(base))
    merge(base, donor, tmp_path / "out")
    fresh = {k: v for k, v in read(tmp_path / "out").items() if k not in read(base)}
    nested = {k.replace("model.", "model.language_model.", 1): v for k, v in read(donor).items() if ".layers.3." in k}
    assert fresh == nested


@pytest.mark.parametrize("indexed", [False, True])
def test_16_a_head_that_the_index_omits_is_found_and_put_into_the_new_index(tmp_path: Path, indexed: bool) -> None:
    """`indexed` is the control."""
    folder = checkpoint(tiny_qwen3_5())
    if not indexed:
        folder.index = dict.fromkeys(folder.shards[TRUNK_SHARD], TRUNK_SHARD)
    donor = write(folder, tmp_path / "donor", 2)
    base = write(headless(tiny_qwen3_5()), tmp_path / "base", 1)
    merge(base, donor, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {k: f for k, f in index.items() if k.startswith("mtp.")} == dict.fromkeys(
        folder.shards[HEAD_SHARD], "model-mtp.safetensors"
    )
    with pytest.raises(NextnError, match="head already"):
        merge(donor, donor, tmp_path / "no")
    merge(donor, donor, tmp_path / "mended", replace=True)
    assert len(head_of(read(tmp_path / "mended"))) == 15
    assert errors(tmp_path / "mended") == set()


def test_17_a_head_for_another_size_is_refused_with_both_shapes(tmp_path: Path) -> None:
    base = write(headless(tiny_qwen3_5(hidden=40)), tmp_path / "base", 1)
    donor = write(checkpoint(tiny_qwen3_5(hidden=32)), tmp_path / "donor", 2)
    with pytest.raises(NextnError) as caught:
        merge(base, donor, tmp_path / "out")
    assert "[32, 64]" in caught.value.what
    assert "[40, 80]" in caught.value.what
    assert not (tmp_path / "out").exists()
    control = write(checkpoint(tiny_qwen3_5(hidden=40)), tmp_path / "control", 2)
    merge(base, control, tmp_path / "out")
    assert read(tmp_path / "out")["mtp.fc.weight"][1] == (40, 80)
