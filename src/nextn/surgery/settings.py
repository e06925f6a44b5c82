"""What a head needs from config.json and its companions, and the edits that put it there.

Count field, the fields that only a head has, the quantisation exemption in every file that declares one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from nextn.errors import NextnError
from nextn.families.contract import Family, lookup
from nextn.families.geometry import text_config
from nextn.surgery.exempt import Json, exempt
from nextn.surgery.names import HeadNames
from nextn.surgery.plan import Edit, Text

QUANT_FIELDS = ("quantization_config", "compression_config")
NESTS = ("", "text_config", "llm_config", "language_config")
ABSENT = "(absent)"


def count_path(family: Family, config: Mapping[str, Any]) -> str | None:
    """Where the layer count is or belongs: the path that is there, else the first whose parent is.

    None where the family declares no count.
    """
    for path in family.layer_count:
        if lookup(config, path) is not None:
            return path
    for path in family.layer_count:
        parent = path.rpartition(".")[0]
        if not parent or isinstance(lookup(config, parent), Mapping):
            return path
    return None


def with_count(family: Family, config: Json, layers: int) -> Json:
    """The config declaring `layers` head layers; unchanged where the family's silence already means that."""
    path = count_path(family, config)
    if path is None or lookup(config, path) == layers:
        return config
    if lookup(config, path) is None and not family.declares_count and family.default_layers == layers:
        return config
    return _set(config, path, layers)


def with_padding(family: Family, config: Json, donor: Mapping[str, Any]) -> Json:
    """The config with its lists of an entry a layer going on into the head's layers, as the donor's do.

    Raises:
        NextnError: a list of the base ends with the target's layers, and the donor's config does not say what follows.
    """
    mine, theirs = text_config(config), text_config(donor)
    layers, there = mine.get("num_hidden_layers"), theirs.get("num_hidden_layers")
    tails: Json = {}
    for name in family.padded_lists:
        listed, longer = mine.get(name), theirs.get(name)
        if not isinstance(listed, list) or len(listed) != layers:
            continue
        if not isinstance(longer, list) or not isinstance(there, int) or len(longer) <= there:
            raise NextnError(
                f"{name} in the base's config.json ends with the target's {layers} layers; engines read it for the"
                " head's layers too, and the head's config.json does not say how it goes on.",
                f"Take the head from a checkpoint whose config has the whole list, or complete {name} in the base.",
            )
        tails[name] = [*listed, *longer[there:]]
    if not tails:
        return config
    nest = _text_nest(config)
    return {**config, nest: {**config[nest], **tails}} if nest else {**config, **tails}


def _text_nest(config: Mapping[str, Any]) -> str:
    """The field that holds the language model's own config; "" where that is the config itself."""
    return next((n for n in NESTS[1:] if isinstance(config.get(n), Mapping)), "")


def with_head_fields(config: Json, donor: Mapping[str, Any]) -> Json:
    """The config with the fields about heads that the donor's has and it lacks (``mtp_…``, ``…nextn…``).

    Those of the donor's language model go to this one's, wherever each keeps it.
    """
    out = deepcopy(config)
    mine, theirs = _text_nest(config), _text_nest(donor)
    pairs = [(out[mine] if mine else out, donor[theirs] if theirs else donor)]
    if mine and theirs:
        pairs.append((out, donor))
    for here, there in pairs:
        for field, value in there.items():
            if ("mtp" in field or "nextn" in field) and field not in here:
                here[field] = deepcopy(value)
    return out


def with_exemption(config: Json, names: HeadNames, unquantised: tuple[str, ...]) -> Json:
    """The config with the head exempted wherever it declares quantisation."""
    out = dict(config)
    for nest, field in _declarations(config):
        holder = dict(out[nest]) if nest else out
        holder[field] = exempt(holder[field], names, unquantised)
        if nest:
            out[nest] = holder
    return out


def without_quantisation(config: Json) -> Json:
    """The config of a checkpoint that holds nothing quantised."""
    out = {k: v for k, v in config.items() if k not in QUANT_FIELDS}
    for nest in NESTS[1:]:
        if isinstance(out.get(nest), dict):
            out[nest] = {k: v for k, v in out[nest].items() if k not in QUANT_FIELDS}
    return out


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether a config declares quantisation."""
    return bool(_declarations(config))


def method(config: Mapping[str, Any], beside: Mapping[str, Any] | None) -> str:
    """The scheme a checkpoint declares, "" for none; `beside` is hf_quant_config.json."""
    for nest, field in _declarations(config):
        declaration = config[nest][field] if nest else config[field]
        return str(declaration.get("quant_method") or declaration.get("quant_algo") or "unnamed").lower()
    return "modelopt" if beside and beside.get("quantization") else ""


def _declarations(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for nest in NESTS:
        holder = config.get(nest) if nest else config
        if isinstance(holder, Mapping):
            found += [(nest, f) for f in QUANT_FIELDS if isinstance(holder.get(f), Mapping)]
    return found


def _set(config: Json, path: str, value: Any) -> Json:
    head, _, rest = path.partition(".")
    return {**config, head: _set(dict(config.get(head) or {}), rest, value) if rest else value}


def edits(file: str, before: Any, after: Any, path: str = "") -> list[Edit]:
    """What differs between two JSON values, as the smallest paths that changed."""
    if before == after:
        return []
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        out: list[Edit] = []
        for key in dict.fromkeys((*before, *after)):
            inner = f"{path}.{key}" if path else str(key)
            out += edits(file, before.get(key, ABSENT), after.get(key, ABSENT), inner)
        return out
    return [Edit(file, path, before, after)]


def to_text(file: str, value: Mapping[str, Any]) -> Text:
    """A JSON file as checkpoints have them: two spaces, non-ASCII kept, a newline at the end."""
    return Text(file, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def to_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any], total_bytes: int) -> Json:
    """The contents of model.safetensors.index.json."""
    return {
        "metadata": {**metadata, "total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }


def unquantised_modules(shapes: Iterable[tuple[str, str, int]]) -> tuple[str, ...]:
    """Modules whose ``weight`` is a matrix in full precision. Takes (key, dtype, dimensions)."""
    full = ("F64", "F32", "F16", "BF16")
    return tuple(
        sorted(
            k.removesuffix(".weight") for k, dtype, n in shapes if n >= 2 and dtype in full and k.endswith(".weight")
        )
    )
