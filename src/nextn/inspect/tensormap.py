"""The whole per-tensor map of a head: names both ways, shape, dtype, bytes, file, and which rule speaks of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nextn.inspect.case import Case


def tensor_map(case: Case) -> Iterator[dict[str, Any]]:
    """One entry a stored head tensor, scales included, in the order of the canonical names' first appearance.

    Keys: ``key``, ``name`` (canonical; null for scales and for tensors that the contract does not know), ``shape``,
    ``dtype``, ``bytes``, ``file``, ``stored`` (``full``, ``fp8``, ``fp4``, ``int4``, ``int8``, or ``scale``),
    ``claimed`` (``full`` or ``quantised`` by the declaration; null for what no scheme quantises), ``rule`` (the list
    entry that decides, null where none names it).
    """
    claimed = {m.tensor.name: m for m in case.claims.head}
    for tensor in case.facts.head.values():
        module = claimed.get(tensor.name)
        claim, rule = None, None
        if module is not None and case.scheme is not None:
            claim = "quantised" if case.claims.quantised(module) else "full"
            rule = next((r.text for name in module.aliases for r in case.scheme.matching(name)), None)
        yield {**_stored(tensor.weight), "name": tensor.name, "stored": tensor.form, "claimed": claim, "rule": rule}
        for scale in tensor.scales:
            yield {**_stored(scale), "name": None, "stored": "scale", "claimed": None, "rule": None}
    for key in (*case.facts.unexpected, *case.facts.foreign, *case.facts.orphans):
        info = case.facts.checkpoint.tensors[key]
        yield {**_stored(info), "name": None, "stored": "unknown", "claimed": None, "rule": None}


def _stored(info: Any) -> dict[str, Any]:
    return {
        "key": info.key,
        "shape": list(info.shape),
        "dtype": info.dtype,
        "bytes": info.nbytes,
        "file": info.file,
    }
