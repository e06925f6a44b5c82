"""What a surgery will do, as frozen data: printable before anything is written.

A plan names every file of the result and where its bytes come from. Making one reads headers and JSON only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nextn.checkpoint.tensors import DTYPE_BITS

LinkMode = Literal["hard", "symlink", "copy"]
Hashes = Mapping[str, str]
"""checkpoint key -> sha256 of the tensor's bytes in its source."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes in a source file. `fetch` reads it where the file is not on this machine."""

    path: Path
    start: int
    nbytes: int
    dtype: str
    fetch: Callable[[int, int], bytes] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a file to be written: its parts end to end, cast to `dtype` where they differ.

    Attributes:
        key: checkpoint key in the result.
        name: canonical name; the key where there is none.
        sources: keys that it is made from.
        scale: the scale of an FP8 tensor that is to be written in full precision.
        block: rows and columns that one number of the scale stands for.
    """

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    sources: tuple[str, ...] = ()
    scale: Part | None = None
    block: tuple[int, int] = (1, 1)

    @property
    def cast(self) -> str | None:
        """The dtype that it is cast from, or None."""
        stored = self.parts[0].dtype if self.parts else self.dtype
        return None if stored == self.dtype else stored


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file to be written. `hashed`: its tensors' sha256 are wanted (and its bytes read for that)."""

    file: str
    pieces: tuple[Piece, ...]
    metadata: Mapping[str, str]
    hashed: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A file taken over from the base as it is."""

    source: Path
    file: str
    mode: LinkMode
    nbytes: int


@dataclass(frozen=True, slots=True)
class Text:
    """A small file to be written; its content may need the hashes of what was written before it."""

    file: str
    content: bytes | Callable[[Hashes], bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a JSON file: the dotted path, and the values before and after."""

    file: str
    path: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Plan:
    """A whole surgery.

    Attributes:
        action: ``merge`` or ``extract``.
        out: the folder that will appear; the base itself for an in-place merge.
        family: slug.
        facts: what a reader wants to know first, as printed.
        links: files taken over unchanged.
        rewritten: base shards written anew without their head tensors: file -> keys left out.
        dropped: base files left out: file -> why.
        moved: files of the base that an in-place merge gives another name: old -> new.
        shards: files written, rewritten ones first, the head's last.
        texts: JSON and text files, in the order in which they are written.
        edits: what changes in JSON files that the base has.
        renamed: source key -> key in the result, where they differ.
        left_out: source key -> why it is not in the result.
        notes: what a user should know.
    """

    action: Literal["merge", "extract"]
    out: Path
    family: str
    facts: Mapping[str, Any]
    links: tuple[Link, ...]
    rewritten: Mapping[str, tuple[str, ...]]
    dropped: Mapping[str, str]
    shards: tuple[Shard, ...]
    texts: tuple[Text, ...]
    edits: tuple[Edit, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    moved: Mapping[str, str] = field(default_factory=dict)

    @property
    def head(self) -> Shard:
        return self.shards[-1]

    @property
    def head_bytes(self) -> int:
        return sum(piece_bytes(p) for p in self.head.pieces)


def piece_bytes(piece: Piece) -> int:
    """Bytes of a piece as it will be written."""
    elements = 1
    for n in piece.shape:
        elements *= n
    return (elements * DTYPE_BITS[piece.dtype] + 7) // 8
