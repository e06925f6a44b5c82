"""How one module's weight is stored, read off key and header: full precision, or quantised and in which form."""

from __future__ import annotations

import re
from functools import lru_cache

from nextn.checkpoint.tensors import DTYPE_BITS, TensorInfo

FULL = frozenset({"F64", "F32", "F16", "BF16"})

WEIGHT_PARTS: tuple[str, ...] = ("weight", "qweight", "weight_packed", "blocks")
"""Parts that hold the weight itself. The first one found decides how the module is stored."""

SCALE_PARTS = frozenset(
    {
        # FP8 block and compressed-tensors
        "weight_scale",
        "weight_scale_inv",
        "scale_inv",
        "scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight_global_scale",
        "input_scale",
        "input_global_scale",
        "input_zero_point",
        # ModelOpt NVFP4
        "weight_scale_2",
        # GPTQ, AWQ, AutoRound
        "scales",
        "qzeros",
        "g_idx",
        # bitsandbytes, below ``weight``
        "absmax",
        "quant_map",
        "quant_state",
        "nested_absmax",
        "nested_quant_map",
        "SCB",
        "weight_format",
    }
)
"""Parts that only mean something beside a quantised weight."""

CACHE_PARTS = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale", "output_scale", "kv_scale"})
"""Scales of activations or of the K/V cache; they say nothing about the weight."""

_STACKED = re.compile(r"(.*?)(?:_weight)?_(scale_inv|scale_2|scale|scales|blocks|global_scale)")
"""Stacked expert tensors carry their scales under the same name with an ending."""


@lru_cache(maxsize=1 << 18)
def split_key(key: str) -> tuple[str, str]:
    """(module, part) of a checkpoint key: ``mtp.fc.weight_scale_inv`` -> (``mtp.fc``, ``weight_scale_inv``).

    Stacked expert tensors have no ``.weight``: ``...experts.gate_up_proj`` -> (itself, ``weight``) and
    ``...experts.gate_up_proj_scale_inv`` -> (``...experts.gate_up_proj``, ``scale_inv``). A key that ends in none of
    the known parts, such as ``...dt_bias``, is its own module with the part "".
    """
    module, _, part = key.rpartition(".")
    if part in WEIGHT_PARTS or part in SCALE_PARTS or part in CACHE_PARTS or part == "bias":
        head, _, tail = module.rpartition(".")
        return (head, part) if tail == "weight" and part in SCALE_PARTS else (module, part)
    if ".quant_state.bitsandbytes__" in key:
        return key[: key.index(".quant_state.")].removesuffix(".weight"), "quant_state"
    if ".experts." in key:
        stacked = _STACKED.fullmatch(key)
        if stacked:
            part = stacked[2]
            return stacked[1], {"scale_2": "weight_scale_2", "global_scale": "weight_global_scale"}.get(part, part)
        return key, "weight"
    return key, ""


def form(info: TensorInfo, part: str) -> str:
    """The storage form of a weight: ``full``, ``fp8``, ``int4`` (packed integers), ``fp4``, ``int8``, or ``ggml``."""
    if part == "qweight" or (part == "weight_packed" and info.dtype in ("I32", "I64")):
        return "int4"
    if part in ("blocks", "weight_packed"):
        return "fp4"
    if info.dtype in FULL:
        return "full"
    if info.dtype not in DTYPE_BITS:
        return "ggml"
    if info.dtype.startswith("F8"):
        return "fp8"
    if info.dtype == "I8":
        return "int8"
    return "fp4"
