"""Read the declarations of all quantisation schemes into one form.

Where each scheme keeps its lists: ModelOpt ``exclude_modules`` (hf_quant_config.json) or ``ignore`` (config.json);
compressed-tensors ``ignore`` and the groups' ``targets``; FP8 ``modules_to_not_convert`` or ``ignored_layers``; GPTQ
``dynamic`` and ``modules_in_block_to_quantize``; AWQ ``modules_to_not_convert``; AutoRound ``extra_config`` and
``block_name_to_quantize``; bitsandbytes ``llm_int8_skip_modules``; Quark ``exclude``. MXFP4 in the form of gpt-oss
quantises experts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nextn.checkpoint.source import Checkpoint
from nextn.errors import NextnError
from nextn.families.geometry import text_config
from nextn.inspect.quant.scheme import Kind, Rule, Scheme, compile_glob, compile_regex

SIDE_FILES = ("hf_quant_config.json", "quantization_config.json", "quantize_config.json", "quant_config.json")
"""Files in which exporters of ModelOpt, AutoRound, GPTQ and AWQ repeat or replace config.json's declaration."""


def read_schemes(checkpoint: Checkpoint) -> tuple[Scheme, ...]:
    """All quantisation declarations of a checkpoint, config.json's first, as engines prefer it.

    Files that are no JSON objects are left out: the declaration in them cannot be read by an engine either.
    """
    config = checkpoint.config
    found: list[Scheme] = []
    for where, holder in (("", config), ("text_config.", text_config(config))):
        for name in ("quantization_config", "compression_config"):
            raw = holder.get(name)
            if isinstance(raw, Mapping) and raw and not found:
                found.append(read_scheme(raw, "config.json", f"{where}{name}"))
    for file in SIDE_FILES:
        if checkpoint.kind == "gguf":
            break
        try:
            raw = checkpoint.json(file)
        except NextnError:
            continue
        if raw:
            found.append(read_scheme(raw, file, ""))
    return tuple(s for s in found if s.method)


def read_scheme(raw: Mapping[str, Any], file: str, path: str) -> Scheme:
    """One declaration, whatever the scheme. A method of "" means that it declares nothing."""
    body: Mapping[str, Any] = raw
    if isinstance(raw.get("quantization"), Mapping):
        body, path = raw["quantization"], f"{path}.quantization".lstrip(".")
    method = str(raw.get("quant_method") or body.get("quant_method") or "").lower()
    algorithm = str(body.get("quant_algo") or body.get("format") or "")
    if not method:
        method = _method_by_shape(raw, body, file)
    reader = READERS.get(_reader_name(method), _plain)
    rules, by_default = reader(body)
    kept: list[Rule] = []
    invalid: list[str] = []
    for key, text, kind, pattern, exempts in rules:
        bad = (kind == "regex" and compile_regex(pattern) is None) or (kind == "glob" and compile_glob(pattern) is None)
        if bad:
            invalid.append(text)
        kept.append(Rule(text, kind, pattern, exempts, f"{file} {path}.{key}".replace(" .", " ")))
    return Scheme(method, algorithm, file, tuple(kept), by_default, tuple(invalid), raw)


def _method_by_shape(raw: Mapping[str, Any], body: Mapping[str, Any], file: str) -> str:
    producer = raw.get("producer")
    if isinstance(producer, Mapping) and producer.get("name"):
        return str(producer["name"]).lower()
    if "quant_algo" in body:
        return "modelopt" if body.get("quant_algo") else ""
    if file == "quantize_config.json" and "bits" in body:
        return "gptq"
    if file == "quant_config.json" and ("w_bit" in body or "bits" in body):
        return "awq"
    if "config_groups" in body:
        return "compressed-tensors"
    if file == "quantization_config.json" and "bits" in body:
        return "auto-round"
    return ""


def _reader_name(method: str) -> str:
    for start, name in (
        ("modelopt", "modelopt"),
        ("auto", "auto-round"),
        ("intel", "auto-round"),
        ("inc", "auto-round"),
    ):
        if method.startswith(start):
            return name
    if method.startswith("gptq"):
        return "gptq"
    return method


Entry = tuple[str, str, Kind, str, bool]
"""Key of the list, entry as written, kind, pattern, whether it exempts."""
Read = tuple[list[Entry], bool]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping):
        return [k for k in value if isinstance(k, str)]
    if isinstance(value, Iterable):
        flat: list[str] = []
        for item in value:
            if isinstance(item, str):
                flat.append(item)
            elif isinstance(item, list):
                flat += [s for s in item if isinstance(s, str)]
        return flat
    return []


def _first(body: Mapping[str, Any], *keys: str) -> tuple[str, list[str]]:
    """The first of several keys that holds a list."""
    for key in keys:
        if body.get(key):
            return key, _strings(body[key])
    return keys[0], []


def _marked(text: str, otherwise: Kind) -> tuple[Kind, str]:
    """``re:`` entries are expressions."""
    return ("regex", text[3:]) if text.startswith("re:") else (otherwise, text)


def _modelopt(body: Mapping[str, Any]) -> Read:
    key, entries = _first(body, "ignore", "exclude_modules", "modules_to_not_convert")
    rules: list[Entry] = []
    for text in entries:
        kind, pattern = _marked(text, "glob" if any(c in text for c in "*?[") else "name")
        rules.append((key, text, kind, pattern, True))
    layers = body.get("quantized_layers")
    if isinstance(layers, Mapping):
        rules += [("quantized_layers", text, "name", text, False) for text in _strings(layers)]
        return rules, False
    return rules, True


def _compressed_tensors(body: Mapping[str, Any]) -> Read:
    rules: list[Entry] = []
    for text in _strings(body.get("ignore")):
        kind, pattern = _marked(text, "exact")
        rules.append(("ignore", text, kind, pattern, True))
    groups = body.get("config_groups")
    by_default = not isinstance(groups, Mapping)
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping) or not group.get("weights", True):
            continue
        for text in _strings(group.get("targets")):
            if text.isidentifier():
                by_default |= "linear" in text.lower() or "expert" in text.lower()
            else:
                kind, pattern = _marked(text, "exact")
                rules.append(("config_groups", text, kind, pattern, False))
    return rules, by_default


def _gptq(body: Mapping[str, Any]) -> Read:
    rules: list[Entry] = []
    dynamic = body.get("dynamic")
    for text in _strings(dynamic) if isinstance(dynamic, Mapping) else ():
        if text.startswith("-:"):
            rules.append(("dynamic", text, "regex", text[2:], True))
    key, entries = _first(body, "modules_to_not_convert")
    rules += [(key, text, "name", text, True) for text in entries]
    inside = _strings(body.get("modules_in_block_to_quantize"))
    rules += [("modules_in_block_to_quantize", text, "name", text, False) for text in inside]
    return rules, not inside


def _auto_round(body: Mapping[str, Any]) -> Read:
    rules: list[Entry] = []
    extra = body.get("extra_config")
    for text, setting in extra.items() if isinstance(extra, Mapping) else ():
        bits = setting.get("bits", 16) if isinstance(setting, Mapping) else None
        if isinstance(text, str) and isinstance(bits, int):
            special = any(c in text for c in "*+?^$()[]{}|\\")
            kind: Kind = "regex" if special else "exact"
            rules.append(("extra_config", text, kind, f"(?:{text})$" if special else text, bits >= 16))
    key, blocks = _first(body, "block_name_to_quantize", "to_quant_block_names")
    rules += [(key, text, "prefix", text, False) for text in blocks]
    return rules, not blocks


def _bitsandbytes(body: Mapping[str, Any]) -> Read:
    key, entries = _first(body, "llm_int8_skip_modules", "modules_to_not_convert")
    return [(key, text, "name", text, True) for text in entries], True


def _quark(body: Mapping[str, Any]) -> Read:
    rules: list[Entry] = []
    for text in _strings(body.get("exclude")):
        kind, pattern = _marked(text, "glob" if "*" in text else "name")
        rules.append(("exclude", text, kind, pattern, True))
    return rules, True


def _plain(body: Mapping[str, Any]) -> Read:
    key, entries = _first(body, "modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules")
    rules: list[Entry] = []
    for text in entries:
        kind, pattern = _marked(text, "name")
        rules.append((key, text, kind, pattern, True))
    return rules, True


def _mxfp4(body: Mapping[str, Any]) -> Read:
    rules, _ = _plain(body)
    return [*rules, ("quant_method", "mxfp4", "name", "experts", False)], False


READERS: dict[str, Callable[[Mapping[str, Any]], Read]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "quark": _quark,
    "mxfp4": _mxfp4,
}
"""Method -> reader; the others (FP8 block, AWQ, FBGEMM, TorchAO) keep one plain list."""
