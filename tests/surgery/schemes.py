"""Quantisation declarations as publishers write them, and how each engine matches a module name against them.

The matchers are written here from the engines' sources, apart from the code under test: vLLM 0.33.0
``quantization/utils/quant_utils.py``, ``modelopt.py``, ``compressed_tensors/utils.py``, ``utils/gptq_utils.py``,
``auto_awq.py``, ``quark/utils.py``; SGLang 0.5.23 ``quantization/utils.py`` and neighbours.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Any

Json = dict[str, Any]
SHARDS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def declarations() -> dict[str, tuple[Json | None, Json | None]]:
    """scheme -> (quantization_config of config.json, hf_quant_config.json)."""
    listed = ["lm_head", "model.embed_tokens"]
    group = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
    return {
        "modelopt": (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": list(listed)},
            {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.embed_tokens*"]}},
        ),
        "modelopt-file": (None, {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}),
        "compressed-tensors": (
            {"quant_method": "compressed-tensors", "config_groups": group, "ignore": [*listed, "re:.*visual.*"]},
            None,
        ),
        "fp8": (
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "activation_scheme": "dynamic",
                "modules_to_not_convert": list(listed),
            },
            None,
        ),
        "fp8-bare": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*visual.*": {}}}, None),
        "gptq-bare": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, None),
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"]}, None),
        "awq-bare": ({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": None}, None),
        "auto-round": ({"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 16}}}, None),
        "quark": ({"quant_method": "quark", "exclude": list(listed), "layer_quant_config": {}}, None),
        "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": None}, None),
    }


def runtime_modules(moe: bool) -> list[str]:
    """The linear modules that engines build for a Qwen3.5 head, under their own (fused) names."""
    layer = "mtp.layers.0"
    mixer = [f"{layer}.self_attn.qkv_proj", f"{layer}.self_attn.o_proj"]
    if not moe:
        return ["mtp.fc", *mixer, f"{layer}.mlp.gate_up_proj", f"{layer}.mlp.down_proj"]
    shared = [f"{layer}.mlp.shared_expert.gate_up_proj", f"{layer}.mlp.shared_expert.down_proj"]
    return ["mtp.fc", *mixer, *shared, f"{layer}.mlp.experts", f"{layer}.mlp.gate", f"{layer}.mlp.shared_expert_gate"]


def exempted(scheme: str, config: Json, beside: Json | None, module: str) -> dict[str, bool]:
    """engine and file -> whether it leaves the module in full precision."""
    kind = scheme.split("-")[0] if scheme not in ("compressed-tensors", "auto-round") else scheme
    declared = config.get("quantization_config")
    out: dict[str, bool] = {}
    if kind == "modelopt":
        if declared is not None:
            out |= _modelopt(declared["ignore"], module, "config")
        if beside is not None:
            out |= _modelopt(beside["quantization"]["exclude_modules"], module, "file")
        return out
    assert declared is not None
    if kind == "compressed-tensors":
        ignore = declared["ignore"]
        return {"sglang 0.5.17": _name_or_regex(module, ignore), "vllm": _shards(module, ignore, _name_or_regex)}
    if kind == "fp8":
        listed = declared["modules_to_not_convert"]
        expert = "experts" in module and any(module in e for e in listed if "experts" in e)
        return {
            "vllm": expert or _shards(module, listed, lambda m, names: m in names),
            "sglang": expert or _shards(module, listed, _path, direct=False),
        }
    if kind == "gptq":
        rules = [r[2:] for r in declared["dynamic"] if r.startswith("-:")]
        named = any(r.startswith("-:") and "mtp" in r for r in declared["dynamic"])
        return {"both": any(re.match(r, module) for r in rules), "vllm's own look for mtp": named}
    if kind == "awq":
        return {"both": any(e in module for e in declared["modules_to_not_convert"])}
    if kind == "auto-round":
        return {"both": _bits(declared["extra_config"], module) == 16}
    if kind == "quark":
        return {"both": _name_or_regex(module, declared["exclude"])}
    return {"vllm": _shards(module, declared["llm_int8_skip_modules"], lambda m, names: m in names)}


def _modelopt(patterns: list[str], module: str, where: str) -> dict[str, bool]:
    parts = module.split(".")
    sglang = any(fnmatch.fnmatchcase(m, p) for p in patterns for m in (module, *parts))
    vllm = any(fnmatch.fnmatchcase(module, p) or p.removesuffix("*") in module for p in patterns)
    return {f"sglang, {where}": sglang, f"vllm, {where}": vllm}


def _name_or_regex(module: str, entries: list[str]) -> bool:
    return any(re.match(e[3:], module) is not None if e.startswith("re:") else e == module for e in entries)


def _path(module: str, entries: list[str]) -> bool:
    return any(f".{e}." in f".{module}." for e in entries)


def _shards(module: str, entries: list[str], match: Any, direct: bool = True) -> bool:
    if direct and match(module, entries):
        return True
    last = module.rpartition(".")[2]
    if last in SHARDS:
        each = [match(module.replace(last, shard), entries) for shard in SHARDS[last]]
        assert len(set(each)) == 1, f"only some of {module}'s parts are listed: engines refuse that"
        return each[0]
    return bool(match(module, entries))


def _bits(rules: Json, module: str) -> int:
    if module in rules:
        return int(rules[module]["bits"])
    for rule, value in rules.items():
        if set("*+?^$()[]{}|\\") & set(rule) and re.fullmatch(rule, module):
            return int(value["bits"])
    return 4
