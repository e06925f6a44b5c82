"""Read a tensor's bytes and decode them to float32, a piece at a time. numpy is imported on first use only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nextn.checkpoint.source import Checkpoint
from nextn.checkpoint.tensors import DTYPE_BITS, TensorInfo
from nextn.errors import NextnError

if TYPE_CHECKING:
    import numpy as np

PIECE_BYTES = 8 << 20
DECODED = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def read_bytes(checkpoint: Checkpoint, info: TensorInfo, start: int = 0, length: int | None = None) -> Iterator[bytes]:
    """The bytes of a tensor, from `start` on, in pieces of at most 8 MiB.

    Raises:
        NextnError: the weights are not on this machine, or the file ends early.
    """
    if checkpoint.root is None:
        raise NextnError(
            f"The weights of {checkpoint.source} are not on this machine.",
            "Download the repository and name its folder.",
        )
    left = info.nbytes - start if length is None else length
    try:
        with (checkpoint.root / info.file).open("rb") as file:
            file.seek(info.start + start)
            while left > 0:
                piece = file.read(min(left, PIECE_BYTES))
                if not piece:
                    raise NextnError(f"{info.file} ends within {info.key}.", "Download it again.")
                left -= len(piece)
                yield piece
    except OSError as error:
        raise NextnError(f"{info.file} cannot be read: {error.strerror}.", "Check the file.") from None


def decode(raw: bytes, dtype: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Bytes of a floating-point dtype as float32 (float64 is narrowed).

    Raises:
        KeyError: a dtype that is not in `DECODED`.
    """
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return _fp8_values(dtype)[np.frombuffer(raw, np.uint8)]
    return np.frombuffer(raw, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


@lru_cache(maxsize=2)
def _fp8_values(dtype: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """All 256 values of an FP8 format (OCP 8-bit floating point, revision 1.0)."""
    import numpy as np

    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == "F8_E4M3" else (5, 2, 15)
    values = np.empty(256, np.float32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
        mantissa = code & (1 << mantissa_bits) - 1
        top = (1 << exponent_bits) - 1
        if dtype == "F8_E4M3" and exponent == top and mantissa == 7:
            value = float("nan")
        elif dtype == "F8_E5M2" and exponent == top:
            value = float("nan") if mantissa else float("inf")
        elif exponent == 0:
            value = mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias)
        else:
            value = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        values[code] = sign * value
    return values


def element_bytes(dtype: str) -> int:
    """Bytes an element; 0 for sub-byte dtypes."""
    return DTYPE_BITS.get(dtype, 0) // 8
