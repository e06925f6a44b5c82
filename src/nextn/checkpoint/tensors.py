"""One tensor as its file's header describes it."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BITS: dict[str, int] = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "C64": 64,
    "I64": 64,
    "U64": 64,
    "I32": 32,
    "U32": 32,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}
"""safetensors dtype -> bits an element (safetensors ``tensor.rs``)."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file: checkpoint key, dtype name, shape, file name relative to the checkpoint, byte range.

    ``start`` is the offset of the first byte from the beginning of the file, ``nbytes`` the length.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int
