"""Write into a quantisation config that the head is not quantised, in each scheme's own form. One function a scheme.

What the forms mean to engines was read in SGLang 0.5.23 and vLLM 0.33.0 ``layers/quantization``. Where a form allows
it, one entry covers the whole head however an engine fuses its modules; where names are compared whole, checkpoint
names and fused names are both written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

from nextn.errors import NextnError
from nextn.surgery.names import HeadNames

Json = dict[str, Any]
Writer = Callable[[Json, HeadNames, "tuple[str, ...]"], None]


def exempt(declaration: Json, names: HeadNames, unquantised: tuple[str, ...]) -> Json:
    """A copy of a ``quantization_config`` (or a hf_quant_config.json) with the head exempted.

    Args:
        declaration: as read from the checkpoint; it is not changed.
        names: the head's modules.
        unquantised: modules of the base that its headers show in full precision; needed where a list that is
            empty means "find out from the files" and one that is not empty no longer does.
    Raises:
        NextnError: the scheme is not known, so that no rule can be written.
    """
    out = deepcopy(declaration)
    writer_for(out)(out, names, unquantised)
    return out


def writer_for(declaration: Json) -> Writer:
    """The function that writes this scheme's exemptions."""
    method = str(declaration.get("quant_method", "")).lower().replace("_", "-")
    if not method and isinstance(declaration.get("quantization"), dict):
        return modelopt
    if "modelopt" in method:
        return modelopt
    for known, writer in WRITERS.items():
        if method == known:
            return writer
    for field, writer in BY_FIELD.items():
        if field in declaration:
            return writer
    raise NextnError(
        f"The base is quantised by {method or 'an unnamed method'}, whose way to exempt a module nextn does not know.",
        "Merge into the unquantised model and quantise afterwards, leaving the head out.",
    )


def modelopt(declaration: Json, names: HeadNames, unquantised: tuple[str, ...]) -> None:
    """Shell patterns in ``exclude_modules`` (hf_quant_config.json) or ``ignore`` (config.json)."""
    entries = [f"{r}*" for r in names.roots] if names.whole else list(names.all)
    nested = declaration.get("quantization")
    _forget_layers(nested if isinstance(nested, dict) else declaration, names)
    if isinstance(nested, dict):
        _extend(nested, "exclude_modules", entries)
        return
    present = [f for f in ("ignore", "exclude_modules", "modules_to_not_convert") if f in declaration]
    for field in present or ["ignore"]:
        _extend(declaration, field, entries)


def compressed_tensors(declaration: Json, names: HeadNames, unquantised: tuple[str, ...]) -> None:
    """``ignore``: whole names, or ``re:`` and an expression matched from the start.

    The expression comes with the names: SGLang 0.5.17 does not expand a fused name, other tools read names only.
    """
    patterns = [f"re:^{re.escape(r)}[.].*" for r in names.roots] if names.whole else _expert_patterns(names)
    _extend(declaration, "ignore", [*patterns, *names.all])


def _expert_patterns(names: HeadNames) -> list[str]:
    return [f"re:^{re.escape(m)}[.].*" for m in names.modules if m.endswith(".experts")]


def listed(declaration: Json, names: HeadNames, unquantised: tuple[str, ...]) -> None:
    """``ignored_layers`` or ``modules_to_not_convert``: names compared whole (FP8, FBGEMM, MXFP4 and relatives)."""
    present = [f for f in ("ignored_layers", "modules_to_not_convert") if isinstance(declaration.get(f), list)]
    for field in present or ["modules_to_not_convert"]:
        _extend(declaration, field, names.all)


def awq(declaration: Json, names: HeadNames, unquantised: tuple[str, ...]) -> None:
    """``modules_to_not_convert``: parts of names.

    With an empty list vLLM finds the unquantised modules in the files; an entry ends that, so they are all listed.
    """
    field = "modules_to_not_convert"
    if not declaration.get(field):
        declaration[field] = []
        _extend(declaration, field, unquantised)
    _extend(declaration, field, names.roots if names.whole else names.all)


def gptq(declaration: Json, names: HeadNames, unquantised: tuple[str, ...]) -> None:
    """``dynamic``: ``-:`` and an expression matched from the start of the module's name (GPTQModel)."""
    rules = dict(declaration.get("dynamic") or {})
    starts = [f".*{re.escape(r)}" for r in (names.roots if names.whole else names.all)]
    ours: Json = {f"-:{s}(?:[.].*)?$": {} for s in starts}
    declaration["dynamic"] = {**ours, **{k: v for k, v in rules.items() if k not in ours}}


def auto_round(declaration: Json, names: HeadNames, unquantised: tuple[str, ...]) -> None:
    """``extra_config``: bits an exact name, or an expression that must match the whole name."""
    rules = dict(declaration.get("extra_config") or {})
    full = {"bits": 16, "data_type": "float"}
    for module in names.all:
        rules[module] = dict(full)
    for root in names.roots if names.whole else ():
        rules[f".*{re.escape(root)}[.].*"] = dict(full)
    declaration["extra_config"] = rules


def quark(declaration: Json, names: HeadNames, unquantised: tuple[str, ...]) -> None:
    """``exclude``: whole names, or ``re:`` and an expression matched from the start."""
    patterns = [f"re:^{re.escape(r)}[.].*" for r in names.roots] if names.whole else []
    _extend(declaration, "exclude", [*names.all, *patterns])


def bitsandbytes(declaration: Json, names: HeadNames, unquantised: tuple[str, ...]) -> None:
    """``llm_int8_skip_modules``: components or whole names."""
    _extend(declaration, "llm_int8_skip_modules", names.all)


def _forget_layers(holder: Json, names: HeadNames) -> None:
    """Take the head out of ``quantized_layers`` (mixed precision), which names what is quantised."""
    layers = holder.get("quantized_layers")
    if isinstance(layers, dict):
        starts = tuple(f"{m}." for m in names.all)
        holder["quantized_layers"] = {
            k: v for k, v in layers.items() if k not in names.all and not k.startswith(starts)
        }


WRITERS: dict[str, Writer] = {
    "compressed-tensors": compressed_tensors,
    "fp8": listed,
    "fbgemm-fp8": listed,
    "mxfp4": listed,
    "mxfp8": listed,
    "blockwise-int8": listed,
    "w8a8-int8": listed,
    "awq": awq,
    "awq-marlin": awq,
    "auto-awq": awq,
    "gptq": gptq,
    "gptqmodel": gptq,
    "gptq-marlin": gptq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "inc": auto_round,
    "quark": quark,
    "bitsandbytes": bitsandbytes,
}
BY_FIELD: dict[str, Writer] = {"modules_to_not_convert": listed, "ignored_layers": listed, "ignore": compressed_tensors}


def _extend(holder: Json, field: str, entries: Iterable[str]) -> None:
    """Append what a list lacks. A field that is null or a lone string becomes a list."""
    old = holder.get(field)
    have = [old] if isinstance(old, str) else list(old or [])
    holder[field] = have + [e for e in dict.fromkeys(entries) if e not in have]
