"""Compare two heads tensor by tensor, under canonical names: equal bytes, changed and by how much, missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nextn.checkpoint.source import Checkpoint
from nextn.checkpoint.tensors import TensorInfo
from nextn.inspect.facts import Facts, HeadTensor
from nextn.inspect.payload import DECODED, decode, element_bytes, read_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or one expert's part of a stacked one: which bytes of which stored tensor."""

    info: TensorInfo
    start: int
    length: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that both heads have and that differs.

    Attributes:
        relative: norm of the difference over norm of the first, None where shapes or formats cannot be compared.
    """

    name: str
    key: str
    other_key: str
    relative: float | None
    note: str = ""


@dataclass(frozen=True)
class Diff:
    """How two heads differ. Names are canonical; experts are compared one by one whatever the storage.

    Attributes:
        note: why nothing was compared, or what the names are where they are not canonical; "" elsewhere.
    """

    other: str
    equal: tuple[str, ...]
    changed: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    note: str = ""

    @property
    def identical(self) -> bool:
        return bool(self.equal) and not (self.changed or self.missing or self.added)

    def as_json(self) -> dict[str, Any]:
        return {
            "other": self.other,
            "identical": self.identical,
            "equal": list(self.equal),
            "changed": [
                {"name": c.name, "key": c.key, "other_key": c.other_key, "relative": c.relative, "note": c.note}
                for c in self.changed
            ],
            "missing": list(self.missing),
            "added": list(self.added),
            "note": self.note,
        }


def diff(first: Facts, second: Facts) -> Diff:
    """Compare the head of `first` with that of `second`; `missing` are those that only `first` has.

    Raises:
        NextnError: weights that are not on this machine.
    """
    mine, theirs = dict(pieces(first)), dict(pieces(second))
    equal: list[str] = []
    changed: list[Change] = []
    for name, piece in mine.items():
        other = theirs.get(name)
        if other is None:
            continue
        change = _compare(name, first.checkpoint, piece, second.checkpoint, other)
        if change is None:
            equal.append(name)
        else:
            changed.append(change)
    missing = tuple(n for n in mine if n not in theirs)
    added = tuple(n for n in theirs if n not in mine)
    return Diff(second.checkpoint.source, tuple(equal), tuple(changed), missing, added, _note(first, second))


def _note(first: Facts, second: Facts) -> str:
    bare = list(dict.fromkeys(f.checkpoint.source for f in (first, second) if not f.head and not f.lookalikes))
    if bare:
        return f"There is nothing to compare: {' and '.join(bare)} {'hold' if len(bare) > 1 else 'holds'} no head."
    if first.family is None or second.family is None:
        return "The family is unknown: tensors that look like a head's are compared by their keys."
    return ""


def pieces(facts: Facts) -> Iterator[tuple[str, Piece]]:
    """Canonical name -> bytes, with stacked experts taken apart: gate first, then up (rows of ``gate_up``).

    Where the family is unknown, the keys that look like a head's.
    """
    for key in facts.lookalikes:
        info = facts.checkpoint.tensors[key]
        yield key, Piece(info, 0, info.nbytes, info.shape)
    for name, tensor in facts.head.items():
        info = tensor.weight
        if (
            tensor.spec.experts == "grouped"
            and tensor.form == "full"
            and len(info.shape) == 3
            and element_bytes(info.dtype)
        ):
            yield from _experts(name, tensor)
        else:
            yield name, Piece(info, 0, info.nbytes, info.shape)


def _experts(name: str, tensor: HeadTensor) -> Iterator[tuple[str, Piece]]:
    info = tensor.weight
    experts, rows, columns = info.shape
    parent, _, part = name.removesuffix(".weight").rpartition(".")
    halves = ("gate", "up") if part == "gate_up" else (part,)
    height = rows // len(halves)
    length = height * columns * element_bytes(info.dtype)
    for expert in range(experts):
        for at, half in enumerate(halves):
            start = (expert * len(halves) + at) * length
            yield f"{parent}.{expert}.{half}.weight", Piece(info, start, length, (height, columns))


def _compare(name: str, ours: Checkpoint, a: Piece, theirs: Checkpoint, b: Piece) -> Change | None:
    if a.shape != b.shape:
        return Change(name, a.info.key, b.info.key, None, f"shape {list(a.shape)} against {list(b.shape)}")
    if a.info.dtype == b.info.dtype:
        same = all(
            x == y
            for x, y in zip(
                read_bytes(ours, a.info, a.start, a.length), read_bytes(theirs, b.info, b.start, b.length), strict=True
            )
        )
        if same:
            return None
    note = "" if a.info.dtype == b.info.dtype else f"{a.info.dtype} against {b.info.dtype}"
    if a.info.dtype not in DECODED or b.info.dtype not in DECODED:
        return Change(name, a.info.key, b.info.key, None, note or f"stored as {a.info.dtype}")
    return Change(name, a.info.key, b.info.key, _relative(ours, a, theirs, b), note)


def _relative(ours: Checkpoint, a: Piece, theirs: Checkpoint, b: Piece) -> float | None:
    import numpy as np

    elements = PIECE_ELEMENTS
    size_a, size_b = element_bytes(a.info.dtype), element_bytes(b.info.dtype)
    total = a.length // size_a
    difference = norm = 0.0
    for at in range(0, total, elements):
        count = min(elements, total - at)
        x = decode(b"".join(read_bytes(ours, a.info, a.start + at * size_a, count * size_a)), a.info.dtype)
        y = decode(b"".join(read_bytes(theirs, b.info, b.start + at * size_b, count * size_b)), b.info.dtype)
        x64 = x.astype(np.float64)
        difference += float(np.square(x64 - y).sum())
        norm += float(np.square(x64).sum())
    if not np.isfinite(difference) or not np.isfinite(norm) or norm == 0:
        return None
    return float(np.sqrt(difference / norm))


PIECE_ELEMENTS = 1 << 21
