"""A merge's result is held to the rules of inspect before it is written, and to what an engine asked for can read."""

from __future__ import annotations

import errno
import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.inspect.examine import examine
from nextn.surgery.command import merge as merge_command
from nextn.surgery.merge import MergeOptions, plan_merge
from nextn.surgery.plan import Plan
from nextn.surgery.result import listed
from nextn.surgery.show import as_lines
from nextn.surgery.write import disk_error, sweep
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
    with pytest.raises(NextnError, match=r"SGLang .* would fail on the result: KeyError"):
        plan_merge(*opened, tmp_path / "other", MergeOptions(engine="sglang"))
    assert plan_merge(*opened, tmp_path / "other", MergeOptions(engine="vllm")).head.pieces


def test_storage_that_the_engine_cannot_read_is_refused(tmp_path: Path) -> None:
    write(headless(tiny_qwen3_next()), tmp_path / "base", 1)
    write(checkpoint(tiny_qwen3_next()), tmp_path / "donor", 2)
    opened = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "donor")
    with pytest.raises(NextnError, match=r"SGLang .* would fail on the result: KeyError: .*experts\.gate_up_proj"):
        plan_merge(*opened, tmp_path / "out", MergeOptions(experts="grouped", engine="sglang"))
    assert plan_merge(*opened, tmp_path / "out", MergeOptions(experts="split", engine="sglang")).notes == ()


def test_unknown_tensors_under_the_heads_names_go_only_when_told(tmp_path: Path) -> None:
    base = headless(tiny_qwen3_5())
    base.put({"mtp.custom.weight": ("BF16", (4, 4))}, TRUNK_SHARD)
    donor = checkpoint(tiny_qwen3_5())
    with pytest.raises(NextnError, match=r"does not know: mtp\.custom\.weight") as caught:
        merge(tmp_path, base, donor)
    assert "--replace" in caught.value.fix
    plan = merge(tmp_path, base, donor, replace=True)
    assert any("mtp.custom.weight" in n for n in plan.notes)
    assert "mtp.custom.weight" not in read(tmp_path / "out")


def test_scales_without_weights_need_no_leave(tmp_path: Path) -> None:
    base = headless(tiny_qwen3_5())
    base.put({"mtp.layers.0.mlp.up_proj.weight_scale_inv": ("F32", (1, 1))}, TRUNK_SHARD)
    merge(tmp_path, base, checkpoint(tiny_qwen3_5()))
    assert not [k for k in read(tmp_path / "out") if "scale" in k]


def step_config(kinds: list[str]) -> dict[str, Any]:
    return {
        "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_nextn_predict_layers": 3, "num_attention_heads": 4, "num_attention_groups": 2,
        "head_dim": 8, "vocab_size": 64, "tie_word_embeddings": False, "layer_types": kinds,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 8},
        "rope_theta": [1e4 + n for n in range(len(kinds))],
    }  # fmt: skip


def test_lists_of_an_entry_a_layer_go_on_into_the_head(tmp_path: Path) -> None:
    """Step-3.5: the head's attention is sliding, with another head count, as only the entries past N say."""
    own, tail = ["full_attention", "sliding_attention"], ["sliding_attention"] * 3
    donor = checkpoint(step_config(own + tail))
    base = headless(step_config(["full_attention", "full_attention"]))
    plan = merge(tmp_path, base, donor)
    assert f"  edited     config.json layer_types: added {', '.join(tail)}" in as_lines(plan, False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "full_attention", *tail]
    assert config["rope_theta"] == [1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3, 1e4 + 4]
    assert {k: v for k, v in read(tmp_path / "out").items() if ".layers.4." in k} == {
        k: v for k, v in read(tmp_path / "donor").items() if ".layers.4." in k
    }
    assert errors(tmp_path / "out") == []


def test_a_list_whose_tail_nobody_has_is_refused(tmp_path: Path) -> None:
    short = step_config(["full_attention", "full_attention"])
    with pytest.raises(NextnError, match=r"layer_types in the base's config\.json ends with the target's 2 layers"):
        merge(tmp_path, headless(short), checkpoint(short))


@pytest.mark.parametrize("flat_donor, flat_base", [(True, False), (False, True), (True, True), (False, False)])
def test_the_count_goes_where_the_base_keeps_its_language_model(
    tmp_path: Path, flat_donor: bool, flat_base: bool
) -> None:
    def folder(make: Any, flat: bool, mtp: int | None) -> Folder:
        config = tiny_qwen3_5(mtp=mtp)
        if flat:
            config = {**config["text_config"], "architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}
        return make(config)

    donor, base = folder(checkpoint, flat_donor, 1), folder(headless, flat_base, None)
    merge(tmp_path, base, donor)
    before = json.loads((tmp_path / "base" / "config.json").read_text())
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    text = after if flat_base else after["text_config"]
    assert text.pop("mtp_num_hidden_layers") == 1
    assert after == before


def test_linked_folders_are_linked_and_hidden_files_named(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "x.py").write_text("x = 1\n")
    write(headless(tiny_qwen3_5()), tmp_path / "base", 1)
    (tmp_path / "base" / "linked").symlink_to("../code")
    (tmp_path / "base" / ".gitattributes").write_text("")
    plan = merge(tmp_path, headless(tiny_qwen3_5()), checkpoint(tiny_qwen3_5()))
    assert (tmp_path / "out" / "linked").is_symlink()
    assert (tmp_path / "out" / "linked" / "x.py").read_text() == "x = 1\n"
    assert not (tmp_path / "out" / ".gitattributes").exists()
    assert "Hidden files and folders are not taken over: .gitattributes." in plan.notes


def test_leftovers_beside_a_name_with_glob_characters_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".x[1].nextn-9-ab").mkdir()
    (tmp_path / ".x1.nextn-9-ab").mkdir()
    sweep(tmp_path / "x[1]")
    assert [p.name for p in tmp_path.iterdir()] == [".x1.nextn-9-ab"]


def test_a_file_limit_is_explained(tmp_path: Path) -> None:
    said = disk_error(OSError(errno.EFBIG, "File too large"), tmp_path / "out")
    assert "larger than this system lets you write" in said.what
    assert "ulimit" in said.fix


def test_an_engine_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NextnError, match="no engine 'foo'"):
        merge_command(tmp_path / "base", "donor", tmp_path / "out", engine="foo")


@pytest.mark.parametrize("head_dtype, named", [("BF16", True), ("U8", False)])
def test_the_output_head_is_exempted_by_sglangs_name_where_the_base_keeps_it_full(
    tmp_path: Path, head_dtype: str, named: bool
) -> None:
    """SGLang builds it a second time in the draft, as model.shared_head.head, and asks the list by that name."""
    config = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 64, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "tie_word_embeddings": False, "use_qk_norm": False,
        "attention_bias": False,
    }  # fmt: skip
    base = headless(config)
    base.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    for shard in base.shards.values():
        if "lm_head.weight" in shard:
            shard["lm_head.weight"] = (head_dtype, shard["lm_head.weight"][1])
    merge(tmp_path, base, checkpoint(config))
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert any(fnmatch.fnmatchcase("model.shared_head.head", entry) for entry in declared) == named
