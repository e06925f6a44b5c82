"""Gather the facts about a checkpoint's head from its headers: what is there, what should be, how it is stored."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from nextn.checkpoint.source import INDEX_NAME, Checkpoint
from nextn.checkpoint.tensors import TensorInfo
from nextn.errors import NextnError
from nextn.families.contract import Dims, Family, TensorSpec, join
from nextn.families.gguf import gguf_declared, gguf_family, gguf_geometry
from nextn.families.lookalike import keys_like_head
from nextn.families.registry import declared_layers, family_geometry, find_family
from nextn.inspect.quant.stored import CACHE_PARTS, SCALE_PARTS, WEIGHT_PARTS, form, split_key

OTHER_DRAFTER = re.compile(r"(^|\.)(mtp|nextn)\b.*\.?(main_proj|markov_head|confidence_head|d2t|t2d)(\.|$)")
"""Modules of drafters that some checkpoints keep under ``mtp.``: they are not MTP heads in any family."""


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """One tensor of the head as the contract knows it, with everything that is stored for it.

    Attributes:
        name: canonical name.
        key: checkpoint key that the contract gives it, whatever the storage.
        layer: head layer.
        weight: the stored weight, in whatever form.
        form: ``full``, ``fp8``, ``fp4``, ``int4`` or ``int8``.
        scales: what is stored beside the weight (scales, zero points, quantisation state).
    """

    name: str
    key: str
    spec: TensorSpec
    layer: int
    weight: TensorInfo
    form: str
    scales: tuple[TensorInfo, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + sum(s.nbytes for s in self.scales)

    @property
    def module(self) -> str:
        return split_key(self.key)[0]


@dataclass(frozen=True)
class Facts:
    """What is so. Nothing here is a judgement.

    Attributes:
        dims: the config's dimensions; empty where the family is unknown.
        declared, declared_by: the count that the config declares, and where.
        head: logical tensors found, by canonical name.
        expected: canonical name -> (checkpoint key, shape); without optional tensors.
        missing: checkpoint keys of expected tensors that no header lists.
        lost: checkpoint keys of whole head layers that the config declares and no header lists.
        unsure: the same for families whose layout is not pinned, where absence alone proves nothing.
        unexpected: keys under the head's names that the contract does not know.
        foreign: keys under the head's names that belong to another drafter.
        orphans: scales whose weight is absent.
        layers: head layers that have tensors of their own.
        lookalikes: keys that look like a head's, where the family is unknown.
        prefix: what stands before the head's keys in this checkpoint.
        alone: whether the files hold the head and nothing else.
        stacked: whether the head's experts are stored as one stacked tensor; None without experts.
    """

    checkpoint: Checkpoint
    family: Family | None
    dims: Dims
    declared: int | None
    declared_by: str | None
    head: Mapping[str, HeadTensor]
    expected: Mapping[str, tuple[str, tuple[int, ...]]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    foreign: tuple[str, ...]
    orphans: tuple[str, ...]
    layers: tuple[int, ...]
    lookalikes: tuple[str, ...]
    prefix: str
    stacked: bool | None
    unsure: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    alone: bool = False

    @property
    def ships_head(self) -> bool:
        """Whether a head should be here: declared, or shipped by the family though nothing is declared."""
        if self.family is None:
            return False
        return bool(self.family.default_layers if self.declared is None else self.declared)

    @property
    def complete(self) -> bool:
        """Every tensor is there; where each draft step has a layer of its own, every declared layer too."""
        whole = bool(self.head) and not self.missing and not self.foreign
        return whole and not (self.lost and self.family is not None and self.family.physical_layers != "reuse")

    @cached_property
    def found(self) -> int:
        return sum(name in self.head for name in self.expected)

    @cached_property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.head.values())

    @cached_property
    def dtypes(self) -> dict[str, int]:
        return dict(Counter(t.weight.dtype for t in self.head.values()).most_common())

    @cached_property
    def missing_by_index(self) -> tuple[str, ...]:
        """Missing head keys that the index places in files that are not there or cannot be read."""
        index, unseen = self.checkpoint.index or {}, self.unseen_files
        keys = {split_key(k)[0] for k, f in index.items() if f in unseen}
        return tuple(k for k in self.missing if split_key(k)[0] in keys)

    @cached_property
    def unseen_files(self) -> frozenset[str]:
        """Weight files that should be there and of which nothing is known: absent or unreadable."""
        return frozenset(self.checkpoint.absent_files) | (frozenset(self.checkpoint.unreadable) - {INDEX_NAME})

    @property
    def in_the_dark(self) -> bool:
        """Whether what is missing may be in files of which nothing is known, or there are no weights at all."""
        listed = set((self.checkpoint.index or {}).values())
        return not self.checkpoint.files or bool(self.unseen_files - listed)


def gather(checkpoint: Checkpoint) -> Facts:
    """The facts of a listed checkpoint.

    Raises:
        NextnError: the config holds values that cannot be.
    """
    is_gguf = checkpoint.kind == "gguf"
    family = gguf_family(architecture(checkpoint)) if is_gguf else find_family(checkpoint.config)
    if family is None:
        lookalikes = keys_like_head(checkpoint.tensors)
        return Facts(checkpoint, None, {}, None, None, {}, {}, (), (), (), (), (), lookalikes, "", None)
    dims: dict[str, int]
    if is_gguf:
        dims = gguf_geometry(checkpoint.gguf, checkpoint.tensors)
        declared, by = gguf_declared(checkpoint.gguf)
        embedding = checkpoint.tensors.get("token_embd.weight")
        if embedding is not None and len(embedding.shape) == 2:
            dims.setdefault("vocab", embedding.shape[0])
    else:
        dims = family_geometry(family, checkpoint.config)
        declared, by = declared_layers(family, checkpoint.config)
    depth = dims.get("layers", 0)

    is_head = _UnderHead(family, depth)
    candidates = [k for k in checkpoint.tensors if is_head(k)]
    parts: dict[str, dict[str, TensorInfo]] = {}
    for key in candidates:
        module, part = split_key(key)
        parts.setdefault(module, {})[part] = checkpoint.tensors[key]

    head: dict[str, HeadTensor] = {}
    unexpected: list[str] = []
    orphans: list[str] = []
    prefixes: Counter[str] = Counter()
    foreign_patterns = [re.compile(p) for p in family.foreign]
    foreign = tuple(k for k in candidates if _is_foreign(k, foreign_patterns))
    for module, stored in parts.items():
        for part, info in stored.items():
            if info.key in foreign:
                continue
            if part in CACHE_PARTS or (part in SCALE_PARTS and any(p in stored for p in WEIGHT_PARTS)):
                continue
            if part in SCALE_PARTS:
                orphans.append(info.key)
                continue
            first = next((p for p in WEIGHT_PARTS if p in stored), None)
            if part in WEIGHT_PARTS and part != first:
                continue
            key = info.key if part not in WEIGHT_PARTS[1:] else f"{module}.weight"
            located = family.locate(key, layers=depth) or (
                family.locate(module, layers=depth) if part == "blocks" else None
            )
            if located is None:
                unexpected.append(info.key)
                continue
            beside = tuple(i for p, i in stored.items() if p in SCALE_PARTS or (p in WEIGHT_PARTS and p != part))
            head[located.name] = HeadTensor(
                located.name,
                key,
                located.spec,
                located.indices.get("i", 0),
                info,
                form(info, part),
                beside if part in WEIGHT_PARTS else (),
            )
            prefixes[located.prefix] += 1

    layers = tuple(sorted({t.layer for t in head.values() if t.spec.placeholders & {"i", "n"}}))
    if head and not any(spec.placeholders & {"i", "n"} for spec in family.head):
        layers = (0,)
    prefix = prefixes.most_common(1)[0][0] if prefixes else ""
    has_experts = any(s.experts and s.applies(dims) for s in family.head)
    stacked = any(t.spec.experts == "grouped" for t in head.values()) if has_experts else None
    count = _layers_expected(layers, declared, family)
    expected = _expected(family, dims, count, stacked=bool(stacked), prefix=prefix)
    missing = tuple(key for name, (key, _) in expected.items() if name not in head)
    pinned = family.confidence == "full" or not head
    lost = _lost(family, dims, declared, layers, stacked=bool(stacked), prefix=prefix) if head else ()
    return Facts(
        checkpoint,
        family,
        dims,
        declared,
        by,
        head,
        expected,
        missing if pinned else (),
        tuple(unexpected),
        foreign,
        tuple(orphans),
        layers,
        (),
        prefix,
        stacked,
        () if pinned else missing,
        lost,
        bool(head)
        and len(candidates) == len(checkpoint.tensors)
        and not (checkpoint.absent_files or checkpoint.unreadable or checkpoint.beside),
    )


def architecture(checkpoint: Checkpoint) -> str:
    """``general.architecture`` of a GGUF; "" elsewhere."""
    return str(checkpoint.gguf.get("general.architecture", ""))


MAX_LOST_LAYERS = 64
"""Lost layers whose tensors are named, at most."""


def _lost(
    family: Family, dims: Dims, declared: int | None, layers: tuple[int, ...], *, stacked: bool, prefix: str
) -> tuple[str, ...]:
    """Keys of the layers that are declared beyond those found."""
    count = (declared or 0) - family.spare_layers
    if not layers or count <= layers[-1] + 1:
        return ()
    first = layers[-1] + 1
    storage = "grouped" if stacked else "split"
    many = family.expected(dims, min(count, first + MAX_LOST_LAYERS), experts=storage, prefix=prefix)
    depth = dims.get("layers", 0)
    try:
        found = [(key, family.locate(key, layers=depth)) for _, key, _, spec in many if not spec.optional]
    except NextnError:
        return ()
    return tuple(key for key, at in found if at is not None and at.indices.get("i", 0) >= first)


def _layers_expected(layers: tuple[int, ...], declared: int | None, family: Family) -> int:
    """How many layers to expect tensors of: those found where some are, else those declared or shipped."""
    if layers:
        return min(layers[-1] + 1, len(layers) + 64)
    return (declared if declared is not None else family.default_layers) or 0


def _expected(
    family: Family, dims: Dims, count: int, *, stacked: bool, prefix: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    storage = "grouped" if stacked else "split"
    try:
        return {
            name: (key, shape)
            for name, key, shape, spec in family.expected(dims, count, experts=storage, prefix=prefix)
            if not spec.optional
        }
    except KeyError as error:
        raise NextnError(
            f"The configuration lacks what {family.title} needs to say its head's shapes ({error.args[0]}).",
            "Restore config.json from the base model.",
        ) from None


def _is_foreign(key: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    return OTHER_DRAFTER.search(key) is not None or any(p.fullmatch(key) for p in patterns)


class _UnderHead:
    """Predicate: does a key stand under the head's names? A cheap test, since a checkpoint may hold 100,000 keys."""

    def __init__(self, family: Family, depth: int) -> None:
        roots: set[str] = set()
        numbered: set[str] = set()
        for spec in family.head:
            before, mark, _ = spec.key.partition("{n}")
            if mark:
                numbered.add(before)
            else:
                roots.add(_root(spec.key))
        self.plain = tuple(join(p, r) for p in family.prefixes for r in roots)
        self.numbered = tuple(join(p, n) for p in family.prefixes for n in numbered)
        self.depth = depth

    def __call__(self, key: str) -> bool:
        if key.startswith(self.plain):
            return True
        for start in self.numbered:
            if key.startswith(start):
                number = key[len(start) :].partition(".")[0]
                if number.isascii() and number.isdigit() and len(number) < 7 and int(number) >= self.depth:
                    return True
        return False


def _root(template: str) -> str:
    """The part of a key template that says "head": up to the first component that names one, else all literal."""
    components = template.split(".")
    for at, component in enumerate(components):
        if "mtp" in component or "nextn" in component:
            end = component if "{" not in component else component.split("{")[0]
            return ".".join([*components[:at], end]) + ("." if at + 1 < len(components) else "")
    return template.split("{")[0]
