"""The header of a GGUF file: metadata and tensor table, without reading weights.

Format: magic, version, two counts, metadata pairs, tensor infos, padding to ``general.alignment``, data (ggml
repository, docs/gguf.md); type numbers and block sizes as in the gguf package's ``constants.py``. The file is read
forward through a window, so that a list of a hundred million numbers costs nothing, and no length field is believed
beyond the size of the file.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nextn.checkpoint.tensors import TensorInfo
from nextn.errors import NextnError

ReadAt = Callable[[int, int], bytes]
"""(offset, length) -> up to that many bytes of the file."""

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Type number -> (name, elements a block, bytes a block)."""

SCALARS: dict[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9
KEPT_VALUES = 64
MAX_VALUES = 4_000_000
"""Values of all lists that must be walked, one file; the largest vocabularies hold a million strings."""
MAX_PAIRS, MAX_TENSORS = 65_536, 65_536
MAX_STRING_BYTES = 16 << 20
MAX_WINDOW = 8 << 20
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class _Window:
    """Reads a file forward, each fetch twice as long as the last."""

    def __init__(self, read_at: ReadAt, size_bytes: int, name: str, first_bytes: int) -> None:
        self.read_at, self.size_bytes, self.name, self.step = read_at, size_bytes, name, first_bytes
        self.base, self.at, self.data = 0, 0, b""
        self.values_left = MAX_VALUES

    @property
    def position(self) -> int:
        return self.base + self.at

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises NextnError where the file ends before."""
        if self.at + count > len(self.data):
            self._fill(count)
        self.at += count
        return self.data[self.at - count : self.at]

    def skip(self, count: int) -> None:
        if self.position + count > self.size_bytes:
            raise self._truncated()
        self.at += count

    def unpack(self, form: str) -> Any:
        form = "<" + form
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def text(self, limit: int = MAX_STRING_BYTES) -> str:
        """A length-prefixed string."""
        (length,) = self.unpack("Q")
        if length > limit:
            raise NextnError(f"{self.name} holds a string of {length} bytes.", "It is damaged; download it again.")
        return self.take(length).decode("utf-8", "replace")

    def skip_texts(self, count: int) -> None:
        """Pass over `count` length-prefixed strings."""
        unpack, width = struct.Struct("<Q").unpack_from, 8
        for _ in range(count):
            if self.at + width > len(self.data):
                self._fill(width)
            self.at += width + unpack(self.data, self.at)[0]
        self.skip(0)

    def _fill(self, count: int) -> None:
        start = self.position
        if start + count > self.size_bytes:
            raise self._truncated()
        kept = self.data[self.at :]
        want = min(max(count - len(kept), self.step), self.size_bytes - start - len(kept))
        self.step = min(2 * self.step, MAX_WINDOW)
        self.data, self.base, self.at = kept + self.read_at(start + len(kept), want), start, 0
        if len(self.data) < count:
            raise self._truncated()

    def _truncated(self) -> NextnError:
        return NextnError(f"{self.name} ends inside its header.", "It is truncated or damaged; download it again.")


def read_gguf(path: Path, name: str | None = None) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Tensors and metadata of a local GGUF file. Raises NextnError as `parse_gguf`, or when it cannot be read."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:

            def read_at(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            return parse_gguf(read_at, size_bytes, name or path.name)
    except OSError as error:
        raise NextnError(f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions.") from None


def parse_gguf(
    read_at: ReadAt, size_bytes: int, name: str, *, first_bytes: int = 1 << 20
) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Tensors and metadata of a GGUF file of `size_bytes` bytes.

    Shapes are in torch's order (the file stores the fastest dimension first); dtype is ggml's name for the type,
    ``TYPE_n`` for one that is not known here, whose length is then the distance to the next tensor.

    Args:
        read_at: reads from the file.
        first_bytes: length of the first read.
    Raises:
        NextnError: not GGUF version 2 or 3 in little-endian order, damaged, or truncated.
    """
    window = _Window(read_at, size_bytes, name, first_bytes)
    if size_bytes < 24 or window.take(4) != b"GGUF":
        raise NextnError(f"{name} is no GGUF file.", "Name a GGUF or safetensors checkpoint.")
    version, tensor_count, pair_count = window.unpack("IQQ")
    if version not in (2, 3):
        how = "in big-endian order" if version and version & 0xFFFF == 0 else f"of version {version}"
        raise NextnError(f"{name} is a GGUF file {how}.", "Convert it again with a current llama.cpp.")
    if tensor_count > MAX_TENSORS or pair_count > MAX_PAIRS:
        raise NextnError(f"{name} claims {tensor_count} tensors and {pair_count} values.", "Download it again.")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = window.text(1 << 16)
        if key in metadata:
            raise NextnError(f"{name} names {key[:80]!r} twice.", "Convert it again.")
        metadata[key] = _value(window, window.unpack("I")[0])
    entries = [_tensor_entry(window) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise NextnError(f"{name} gives its alignment as {str(alignment)[:40]}.", "Convert it again.")
    data_start = -(-window.position // alignment) * alignment
    return _place(entries, data_start, size_bytes, name), metadata


def _value(window: _Window, kind: int, depth: int = 0) -> Any:
    if kind in SCALARS:
        return window.unpack(SCALARS[kind])[0]
    if kind == STRING:
        return window.text()
    if kind != ARRAY or depth > 3:
        raise NextnError(f"{window.name} holds a value of unknown kind {kind}.", "It is damaged; download it again.")
    inner, count = window.unpack("IQ")
    if inner in SCALARS and count > KEPT_VALUES:
        window.skip(count * struct.calcsize("<" + SCALARS[inner]))
        return {"length": count}
    window.values_left -= count
    if window.values_left < 0:
        raise NextnError(f"{window.name} claims a list of {count} values.", "It is damaged; download it again.")
    if count > KEPT_VALUES and inner == STRING:
        window.skip_texts(count)
        return {"length": count}
    values = [_value(window, inner, depth + 1) for _ in range(count)]
    return values if count <= KEPT_VALUES else {"length": count}


def _tensor_entry(window: _Window) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape in torch's order, type number, offset from the start of the data."""
    key = window.text(1 << 16)
    (rank,) = window.unpack("I")
    if rank > 8:
        raise NextnError(f"{window.name} gives {key[:80]!r} {rank} dimensions.", "It is damaged; download it again.")
    *sizes, kind, offset = window.unpack(f"{rank}QIQ")
    return key, tuple(reversed(sizes)), kind, offset


def _place(
    entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int, size_bytes: int, name: str
) -> dict[str, TensorInfo]:
    """Lengths and checks of the tensor table. Raises NextnError."""
    tensors: dict[str, TensorInfo] = {}
    room = max(size_bytes - data_start, 0)
    starts = sorted({offset for _, _, _, offset in entries})
    following = dict(zip(starts, [*starts[1:], room], strict=False))
    for key, shape, kind, offset in entries:
        if key in tensors:
            raise NextnError(f"{name} names the tensor {key[:80]!r} twice.", "Convert it again.")
        elements = math.prod(shape)
        dtype, block, block_bytes = GGML_TYPES.get(kind, (f"TYPE_{kind}", 0, 0))
        if block and (shape[-1] if shape else 1) % block:
            raise NextnError(
                f"In {name}, a row of {key[:80]!r} is no multiple of a {dtype} block.", "Convert it again."
            )
        nbytes = elements // block * block_bytes if block else following[offset] - offset
        if offset > room or nbytes > room - offset:
            raise NextnError(f"{name} is truncated: {key[:80]!r} ends past the end of the file.", "Download it again.")
        tensors[key] = TensorInfo(key, dtype, shape, name, data_start + offset, nbytes)
    at = data_start
    for info in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if info.start < at:
            raise NextnError(f"In {name}, {info.key[:80]!r} overlaps the tensor before it.", "Convert it again.")
        at = info.start + info.nbytes
    return tensors


def split_names(name: str) -> tuple[str, ...]:
    """All pieces of a split GGUF by the name of one: ``m-00002-of-00003.gguf`` gives three names; one name if whole.

    Raises:
        NextnError: the numbering is not possible.
    """
    match = SPLIT_NAME.fullmatch(name)
    if not match:
        return (name,)
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count or count > 10_000:
        raise NextnError(f"{name} is numbered {number} of {count}.", "Rename it, or download it again.")
    return tuple(f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))
