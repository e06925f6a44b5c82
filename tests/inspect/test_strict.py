"""List matching against what the engines' own functions answered.

matched_by_engines.json holds, for each engine and method: module name, list entries, whether the fused names were
given, and the answer of the engine's function (``split`` where it raised), recorded with SGLang 0.5.23 and vLLM 0.33.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nextn.inspect.quant.read import read_scheme
from nextn.inspect.quant.strict import Built, SplitError, exempt

RECORDED = json.loads((Path(__file__).parent / "matched_by_engines.json").read_text())
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LISTS = {
    "modelopt": lambda e: {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": e},
    "compressed-tensors": lambda e: {"quant_method": "compressed-tensors", "ignore": e},
    "fp8": lambda e: {"quant_method": "fp8", "modules_to_not_convert": e},
    "awq": lambda e: {"quant_method": "awq", "modules_to_not_convert": e},
    "bitsandbytes": lambda e: {"quant_method": "bitsandbytes", "llm_int8_skip_modules": e},
    "quark": lambda e: {"quant_method": "quark", "exclude": e},
    "gptq": lambda e: {"quant_method": "gptq", "bits": 4, "dynamic": {x: {} for x in e}},
    "auto-round": lambda e: {"quant_method": "auto-round", "bits": 4, "extra_config": {x: {"bits": 16} for x in e}},
}


def built(name: str) -> Built:
    parent, _, part = name.rpartition(".")
    if part in FUSED:
        return Built(name, tuple(f"{parent}.{p}" for p in FUSED[part]))
    if part == "experts":
        return Built(name, tuple(f"{name}.0.{p}_proj" for p in ("gate", "up", "down")), experts=True)
    return Built(name)


def ours(engine: str, method: str, entries: list[str], name: str, expands: bool) -> bool | str:
    scheme = read_scheme(LISTS[method](entries), "config.json", "quantization_config")
    try:
        return exempt(engine, scheme, built(name), expands=expands)
    except SplitError:
        return "split"


@pytest.mark.parametrize("matcher", RECORDED)
def test_lists_are_matched_as_the_engine_matches_them(matcher: str) -> None:
    engine, method = matcher.split()[:2]
    answers: set[Any] = set()
    for name, entries, expands, answer in RECORDED[matcher]:
        assert ours(engine, method, entries, name, expands) == answer, (name, entries)
        answers.add(answer)
    assert {True, False} <= answers


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("method", "entries", "name", "answer"),
    [
        ("gptq", ["-:.*mtp.*"], "mtp.layers.0.self_attn.qkv_proj", True),
        ("gptq", ["-:.*q_proj"], "mtp.layers.0.self_attn.qkv_proj", False),
        ("gptq", ["+:.*mtp.*"], "mtp.layers.0.self_attn.qkv_proj", False),
        ("gptq", ["-:mtp"], "model.mtp.fc", False),
        ("auto-round", [".*mtp.*"], "mtp.layers.0.mlp.experts", True),
        ("auto-round", ["mtp.layers.0.mlp.experts.0.gate_proj"], "mtp.layers.0.mlp.experts", True),
        ("auto-round", [f"mtp.layers.0.self_attn.{p}_proj" for p in "qkv"], "mtp.layers.0.self_attn.qkv_proj", True),
        ("auto-round", ["mtp.layers.0.self_attn.q_proj"], "mtp.layers.0.self_attn.qkv_proj", "split"),
        ("auto-round", ["mtp"], "mtp.fc", False),
    ],
)
def test_expressions_of_gptq_and_auto_round(
    engine: str, method: str, entries: list[str], name: str, answer: bool | str
) -> None:
    assert ours(engine, method, entries, name, expands=True) == answer
