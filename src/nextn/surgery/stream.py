"""Move tensor bytes from file to file in bounded memory: copy, cast, hash, and lay out a safetensors header.

No file is ever held in memory; a chunk is. Casts between float formats are done by numpy a chunk at a time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from nextn.checkpoint.tensors import DTYPE_BITS
from nextn.errors import NextnError
from nextn.surgery.plan import Part, Piece, Shard, piece_bytes

CHUNK_BYTES = 8 << 20
CASTABLE = ("F64", "F32", "F16", "BF16")
FP8 = ("F8_E4M3", "F8_E5M2")
Array = np.ndarray[Any, np.dtype[Any]]
Advance = Callable[[int], None]


def lay_out(pieces: Sequence[Piece], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a safetensors file whose tensors follow in the order given (length, JSON, padding to 8)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for piece in pieces:
        end = at + piece_bytes(piece)
        header[piece.key] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def in_file_order(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Widest elements first, then by key: every tensor starts at a multiple of its element size."""
    return tuple(sorted(pieces, key=lambda p: (-DTYPE_BITS[p.dtype], p.key)))


def write_shard(target: int, shard: Shard, advance: Advance) -> dict[str, str]:
    """Write a shard's header and tensors to a file descriptor.

    Returns:
        key -> sha256 of the tensor's source bytes, for a shard that is to be hashed; else {}.
    Raises:
        NextnError: a source is shorter than its header said, or a value does not fit the dtype.
        OSError: from the file system.
    """
    write_all(target, lay_out(shard.pieces, shard.metadata))
    hashes: dict[str, str] = {}
    for piece in shard.pieces:
        if piece.cast is None and not shard.hashed and all(p.fetch is None for p in piece.parts):
            for part in piece.parts:
                copy_range(target, part, advance)
            continue
        digest = hashlib.sha256()
        for raw in _converted(piece, digest.update):
            write_all(target, raw)
            advance(len(raw))
        hashes[piece.key] = digest.hexdigest()
    return hashes if shard.hashed else {}


def write_all(target: int, raw: bytes) -> None:
    """Write every byte; os.write may take fewer."""
    view = memoryview(raw)
    while view:
        view = view[os.write(target, view) :]


def copy_range(target: int, part: Part, advance: Advance) -> None:
    """Append a byte range of a file, in the kernel where the file systems allow it."""
    source = os.open(part.path, os.O_RDONLY)
    try:
        at, left, in_kernel = part.start, part.nbytes, True
        while left:
            moved = 0
            if in_kernel:
                try:
                    moved = os.copy_file_range(source, target, min(left, 1 << 30), offset_src=at)
                except OSError as error:
                    if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                        raise
                    in_kernel = False
                    continue
            else:
                raw = os.pread(source, min(left, CHUNK_BYTES), at)
                write_all(target, raw)
                moved = len(raw)
            if not moved:
                raise _short(part)
            at += moved
            left -= moved
            advance(moved)
    finally:
        os.close(source)


def chunks(part: Part, size_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """A part's bytes, `size_bytes` at a time (the last may be shorter).

    Raises:
        NextnError: the file ends before the part does.
    """
    if part.fetch is not None:
        for at in range(0, part.nbytes, size_bytes):
            raw = part.fetch(part.start + at, min(size_bytes, part.nbytes - at))
            if len(raw) != min(size_bytes, part.nbytes - at):
                raise _short(part)
            yield raw
        return
    with part.path.open("rb", buffering=0) as file:
        file.seek(part.start)
        left = part.nbytes
        while left:
            raw = b""
            want = min(left, size_bytes)
            while len(raw) < want:
                more = file.read(want - len(raw))
                if not more:
                    raise _short(part)
                raw += more
            left -= want
            yield raw


def _short(part: Part) -> NextnError:
    return NextnError(f"{part.path} ends before its header says it does.", "Download or export it again.")


def _converted(piece: Piece, seen: Callable[[bytes], object]) -> Iterator[bytes]:
    """A piece's bytes in its own dtype; `seen` is given the source bytes."""
    if piece.scale is not None:
        yield from _scaled(piece, seen)
        return
    for part in piece.parts:
        for raw in chunks(part):
            seen(raw)
            if part.dtype == piece.dtype:
                yield raw
            else:
                yield encode(decode(raw, part.dtype), piece.dtype, piece.key)


def _scaled(piece: Piece, seen: Callable[[bytes], object]) -> Iterator[bytes]:
    """An FP8 matrix [out, in] times its scale: one number, one a row, or one a block (DeepSeek-V3 report, 3.3)."""
    assert piece.scale is not None
    columns = piece.shape[1]
    down, across = piece.block
    raw_scale = b"".join(chunks(piece.scale))
    scale = decode(raw_scale, piece.scale.dtype).reshape(-(-piece.shape[0] // down), -(-columns // across))
    (part,) = piece.parts
    done = 0
    for raw in chunks(part, columns * max(1, CHUNK_BYTES // (4 * columns))):
        seen(raw)
        values = decode(raw, part.dtype).reshape(-1, columns)
        block = (done + np.arange(len(values))) // down
        yield encode(values * np.repeat(scale[block], across, axis=1)[:, :columns], piece.dtype, piece.key)
        done += len(values)


def decode(raw: bytes, dtype: str) -> Array:
    """Bytes as float32 (float64 for F64), flat."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    if dtype == "F8_E8M0":
        return np.exp2(np.frombuffer(raw, "u1").astype(np.float32) - 127)
    if dtype in FP8:
        return _fp8_values(dtype)[np.frombuffer(raw, "u1")]
    if dtype == "F16":
        return np.frombuffer(raw, "<f2").astype("<f4")
    return np.frombuffer(raw, "<f8" if dtype == "F64" else "<f4")


def encode(values: Array, dtype: str, key: str) -> bytes:
    """Floats as bytes of `dtype`, rounded to nearest even.

    Raises:
        NextnError: a finite value would become infinite.
    """
    with np.errstate(over="ignore"):
        if dtype == "BF16":
            bits = np.ascontiguousarray(values, "<f4").view("<u4")
            nan = np.isnan(values)
            out = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
            out[nan] = ((bits[nan] >> 16) | 0x40).astype("<u2")
            overflow = ((out & 0x7FFF) == 0x7F80) & np.isfinite(values)
        else:
            out = values.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype])
            overflow = np.isinf(out) & np.isfinite(values)
    if overflow.any():
        raise NextnError(
            f"{key} holds {float(values[overflow].ravel()[0]):.6g}, which does not fit {dtype}.",
            "Choose a wider --dtype.",
        )
    return out.tobytes()


@lru_cache(maxsize=2)
def _fp8_values(dtype: str) -> Array:
    """The 256 values of an FP8 format (Micikevicius et al. 2022, table 1; E4M3 is the finite-only variant)."""
    exponent_bits, bias = (4, 7) if dtype == "F8_E4M3" else (5, 15)
    mantissa_bits = 7 - exponent_bits
    out = np.empty(256, np.float32)
    for code in range(256):
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        value = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        if dtype == "F8_E4M3" and code & 0x7F == 0x7F:
            value = np.nan
        if dtype == "F8_E5M2" and exponent == 31:
            value = np.nan if fraction else np.inf
        out[code] = -value if code & 0x80 else value
    return out
