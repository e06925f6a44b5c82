"""Refuse a head that does not belong: partial, of another shape, of another geometry, of another family.

Each refusal names the tensor and both shapes, or the field and both values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nextn.errors import NextnError
from nextn.families.contract import Dims, Family
from nextn.inspect.facts import Facts
from nextn.surgery.pieces import is_shared_copy

SAME_MATHS = ("head", "fuse", "order", "norm", "target_hidden", "physical_layers")


def few(keys: Iterable[str], limit: int = 4) -> str:
    """The first names of many, for a sentence."""
    names = list(keys)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def require_family(facts: Facts) -> Family:
    """The family of a checkpoint. Raises NextnError where it is unknown."""
    if facts.family is None:
        kind = facts.checkpoint.config.get("model_type")
        raise NextnError(
            f"{facts.checkpoint.source} is of model type {kind!r}, of which nextn knows no MTP head.",
            "Check model_type and architectures in config.json.",
        )
    return facts.family


def require_whole(facts: Facts) -> None:
    """Raises NextnError where a checkpoint holds no head, half a head, or something else under its names."""
    source = facts.checkpoint.source
    if facts.foreign:
        raise NextnError(
            f"{source} keeps another kind of drafter under the head's names ({few(facts.foreign)}).",
            "It is no MTP head; take one from another checkpoint.",
        )
    if not facts.head:
        raise NextnError(f"{source} holds no MTP head.", "Name a checkpoint that does; `nextn inspect` shows it.")
    split = [t.weight.key for t in facts.head.values() if t.spec.experts == "split"]
    if facts.stacked and split:
        raise NextnError(
            f"The head in {source} holds its experts twice, stacked and one by one ({few(split)}).",
            "Remove one of the two storages; which one an engine reads differs.",
        )
    if facts.missing:
        raise NextnError(
            f"The head in {source} is partial: {len(facts.missing)} of {len(facts.expected)} tensors are missing"
            f" ({few(facts.missing)}).",
            "Take a complete head; an engine would leave these weights at random.",
        )
    stored = len(facts.layers)
    if facts.declared and stored and facts.declared > stored and facts.family and _one_each(facts.family):
        raise NextnError(
            f"{source} declares {facts.declared} head layers ({facts.declared_by}) and holds {stored}.",
            "Take a complete head, or correct the count in its config.json.",
        )
    if facts.unexpected:
        raise NextnError(
            f"{source} holds tensors under the head's names that its family does not know: {few(facts.unexpected)}.",
            "An engine would refuse or ignore them; remove them, or check which family made this head.",
        )


def _one_each(family: Family) -> bool:
    return family.physical_layers != "reuse"


def require_fit(head: Facts, base: Facts) -> None:
    """Raises NextnError where a complete head is not one for this base."""
    family, other = require_family(base), require_family(head)
    if family.name != other.name:
        differs = [f for f in SAME_MATHS if getattr(family, f) != getattr(other, f)]
        if differs:
            raise NextnError(
                f"The head in {head.checkpoint.source} is a {other.title} head and the base is {family.title}.",
                "Take a head of the base's own family.",
            )
    shapes = _shapes(head, family, base.dims)
    wrong = [
        (tensor.weight, shapes[name], name)
        for name, tensor in head.head.items()
        if tensor.form in ("full", "fp8")
        and not is_shared_copy(tensor, family, base.dims)
        and not _fits(tensor.weight.shape, shapes[name])
    ]
    if wrong:
        weight, wanted, _ = max(wrong, key=lambda w: (w[2].endswith(".fuse.weight"), len(w[1])))
        more = f" ({len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
        raise NextnError(
            f"{weight.key} has shape {list(weight.shape)} in {head.checkpoint.source}"
            f" and must have {_shown(wanted)} for {base.checkpoint.source}{more}.",
            "Take a head that was made for a model of this size.",
        )
    if head.checkpoint.config is base.checkpoint.config:
        return
    used = {n for t in head.head.values() for s in t.spec.shape for n in re.findall(r"[a-z_]+", s)} - {"vocab", "one"}
    for name in sorted(used | {"heads", "kv_heads", "head_dim", "experts_per_token"}):
        mine, theirs = base.dims.get(name), head.dims.get(name)
        if mine is not None and theirs is not None and mine != theirs:
            raise NextnError(
                f"The head was made for {name} = {theirs} and the base has {name} = {mine}.",
                "Take a head that was made for a model of this geometry.",
            )


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a shape is the wanted one; negative sizes are those that the contract does not pin."""
    return len(shape) == len(wanted) and all(w < 0 or w == n for n, w in zip(shape, wanted, strict=True))


def _shown(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join("?" if n < 0 else str(n) for n in shape) + "]"


def _shapes(head: Facts, family: Family, dims: Dims) -> dict[str, tuple[int, ...]]:
    depth = max(head.layers, default=0) + 1
    storage = "grouped" if head.stacked else "split"
    try:
        expected = {n: shape for n, _, shape, _ in family.expected(dims, depth, experts=storage)}
    except KeyError as error:
        raise NextnError(
            f"The base's config.json lacks what {family.title} needs to say its head's shapes ({error.args[0]}).",
            "Restore the base's config.json.",
        ) from None
    strange = [t.weight.key for n, t in head.head.items() if n not in expected]
    if strange:
        raise NextnError(
            f"The base's config has no place for {few(strange)}.",
            "Take a head that was made for a model of this geometry.",
        )
    return expected
