"""Broken checkpoints, one for each numbered field report, and the clean one beside each: built from geometries."""

from __future__ import annotations

from typing import Any

from tests.fixtures import HEAD_SHARD, Folder, checkpoint, qwen3_5, qwen3_5_moe, qwen3_next

Json = dict[str, Any]

ATTENTION = [f"mtp.layers.0.self_attn.{p}_proj" for p in "qkvo"]
MLP = [f"mtp.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")]
GATES = ["mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]


def compressed(ignore: list[str]) -> Json:
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
        "ignore": ["lm_head", *ignore],
    }


def modelopt(exclude: list[str]) -> Json:
    return {
        "producer": {"name": "modelopt", "version": "0.37.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head", *exclude],
        },
    }


def report_01(broken: bool) -> Folder:
    folder = checkpoint(qwen3_5())
    if broken:
        folder.drop(lambda k: k.startswith("mtp."))
        del folder.shards[HEAD_SHARD]
    return folder


def report_02(broken: bool, *, deleted: bool = False) -> Folder:
    folder = checkpoint(qwen3_5())
    if broken and deleted:
        del folder.config["text_config"]["mtp_num_hidden_layers"]
    elif broken:
        folder.config["text_config"]["mtp_num_hidden_layers"] = 0
    return folder


def report_03(broken: bool) -> Folder:
    folder = checkpoint(qwen3_next())
    if broken:
        folder.drop(lambda k: k.startswith("mtp."))
        del folder.shards[HEAD_SHARD]
    return folder


def report_04(broken: bool) -> Folder:
    """Broken is how it looks, not how it is: a head under another exporter's prefix is whole."""
    return checkpoint(qwen3_5(), prefix="model.language_model." if broken else "")


def report_05(broken: bool, *, grafted: bool = False) -> Folder:
    """An INT4 folder without a head, or with a bf16 head that no rule exempts; clean with the rule."""
    folder = checkpoint(qwen3_5())
    folder.config["quantization_config"] = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    if not broken:
        folder.config["quantization_config"]["extra_config"] = {".*mtp.*": {"bits": 16, "data_type": "float"}}
    elif not grafted:
        folder.drop(lambda k: k.startswith("mtp."))
        del folder.shards[HEAD_SHARD]
    return folder


def report_08(broken: bool) -> Folder:
    folder = checkpoint(qwen3_5_moe(experts=4))
    folder.extra["hf_quant_config.json"] = modelopt(["mtp.layers.0*"] if broken else ["mtp*"])
    return folder


def report_09(broken: bool) -> Folder:
    folder = checkpoint(qwen3_5())
    folder.config["quantization_config"] = compressed(["mtp.fc", *ATTENTION, *MLP] if broken else ["re:.*mtp.*"])
    return folder


def report_10(broken: bool) -> Folder:
    folder = checkpoint(qwen3_5_moe(experts=8))
    listed = ["mtp.fc", *GATES, "re:mtp\\.layers\\.0\\.self_attn\\..*", "re:.*shared_expert.*"]
    folder.config["quantization_config"] = compressed(listed + ([] if broken else ["re:mtp\\..*experts.*"]))
    return folder


def report_11(broken: bool) -> Folder:
    folder = checkpoint(qwen3_5())
    folder.config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    if not broken:
        folder.config["quantization_config"]["dynamic"] = {"-:.*mtp.*": {}}
    return folder


def report_12(broken: bool, *, mixed: bool = False) -> Folder:
    """Quark MXFP4: 172 excludes that name nothing of a bf16 head; or experts MXFP4 and the rest bf16, as declared."""
    folder = checkpoint(qwen3_5_moe(experts=4))
    others = [f"model.language_model.layers.{i}.mlp.{p}" for i in range(43) for p in ("gate", "a", "b", "c")]
    exclude = [] if broken else ["re:mtp\\..*"]
    if mixed:
        exclude = [
            "mtp.fc",
            *GATES,
            *ATTENTION,
            *(f"mtp.layers.0.mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")),
        ]
        quantise_experts(folder)
        if broken:
            exclude = [e for e in exclude if e != "mtp.fc"]
    folder.config["quantization_config"] = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
        "exclude": others + exclude,
    }
    return folder


def quantise_experts(folder: Folder) -> None:
    """Store the head's routed experts as MXFP4: packed pairs, and one E8M0 scale for 32 values."""
    for key, (_, (rows, columns)) in [(k, e) for k, e in folder.head.items() if ".experts." in k]:
        folder.head[key] = ("U8", (rows, columns // 2))
        folder.head[f"{key}_scale"] = ("U8", (rows, columns // 32))


def report_13(broken: bool) -> Folder:
    folder = checkpoint(qwen3_5())
    folder.config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "mtp.fc", *ATTENTION, *MLP],
    }
    if broken:
        folder.put({"mtp.layers.0.self_attn.q_proj.weight_scale_inv": ("F32", (32, 8))})
    return folder


def report_14(broken: bool) -> Folder:
    return checkpoint(qwen3_5_moe(), experts="grouped" if broken else "split")


def report_16(broken: bool) -> Folder:
    folder = checkpoint(qwen3_5())
    if broken:
        folder.index = {k: f for f, tensors in folder.shards.items() if f != HEAD_SHARD for k in tensors}
    return folder


def report_17(broken: bool) -> Folder:
    folder = checkpoint(qwen3_5(2560, 9216, 32, 16, 4, 32))
    if broken:
        folder.put({"mtp.fc.weight": ("BF16", (2048, 4096))})
    return folder
