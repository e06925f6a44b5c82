"""The header of a safetensors file: parsed and checked without reading weights.

Format: 8 bytes little-endian header length, that many bytes of JSON, then the data; byte ranges count from the end
of the header (huggingface/safetensors, README "Format"). The ranges must follow one another without gap or overlap
and end where the file ends, since the library that engines load with refuses anything else. Nothing is allocated
from a length field that the file cannot hold.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from nextn.checkpoint.jsonfile import parse_json
from nextn.checkpoint.tensors import DTYPE_BITS, TensorInfo
from nextn.errors import NextnError

MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library itself enforces."""
MAX_RANK = 32
AGAIN = "Download or export it again."


def read_header(path: Path, name: str | None = None) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata of a local safetensors file.

    Args:
        path: the file.
        name: how to call it in `TensorInfo.file`; its own name if None.
    Raises:
        NextnError: the file cannot be read, is truncated, or its header is not valid.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            return parse_header(_header_bytes(file, size_bytes, path), size_bytes, name or path.name)
    except OSError as error:
        raise NextnError(f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions.") from None


def header_length(first: bytes, size_bytes: int, name: str) -> int:
    """Length of the header JSON, from the first bytes of a file of `size_bytes` bytes.

    Raises:
        NextnError: the file is too short, is a git-lfs pointer, or cannot hold the header that it claims.
    """
    if first.startswith(b"version "):
        raise NextnError(f"{name} is a git-lfs pointer, not the weights.", "Run git lfs pull, or download it again.")
    if len(first) < 8:
        raise NextnError(f"{name} is only {size_bytes} bytes long, no safetensors file.", "Download it again.")
    (length,) = struct.unpack("<Q", first[:8])
    if length > MAX_HEADER_BYTES or length + 8 > size_bytes:
        raise NextnError(
            f"{name} claims a header of {length} bytes in a file of {size_bytes} bytes.",
            "It is truncated or not a safetensors file; download it again.",
        )
    return int(length)


def _header_bytes(file: BinaryIO, size_bytes: int, path: Path) -> bytes:
    length = header_length(file.read(8), size_bytes, str(path))
    raw = file.read(length)
    if len(raw) < length:
        raise NextnError(f"{path} ends inside its header.", "It is truncated; download it again.")
    return raw


def parse_header(raw: bytes, size_bytes: int, name: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parse header JSON (without the 8 length bytes) of a file of `size_bytes` bytes.

    Raises:
        NextnError: not JSON, a key twice, an unknown dtype, or byte ranges that do not fit shape, file or each other.
    """
    header: Any = parse_json(raw, f"The header of {name}", unique_keys=True, fix=AGAIN)
    if not isinstance(header, dict):
        raise NextnError(f"The header of {name} is not a JSON object.", AGAIN)
    data_start = 8 + len(raw)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise NextnError(f"The header of {name} holds metadata that is not text.", AGAIN)
    tensors = {key: _tensor(key, entry, data_start, name) for key, entry in header.items()}
    at = data_start
    for info in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if info.start != at:
            relation = "overlaps the tensor before it" if info.start < at else "leaves a gap before it"
            raise NextnError(f"In {name}, the data of {info.key[:80]!r} {relation}.", AGAIN)
        at += info.nbytes
    if at > size_bytes:
        raise NextnError(f"{name} is truncated: its data ends {at - size_bytes} bytes past the end of the file.", AGAIN)
    if at < size_bytes:
        raise NextnError(f"{name} has {size_bytes - at} bytes after its last tensor.", AGAIN)
    return tensors, metadata


def _tensor(key: str, entry: Any, data_start: int, name: str) -> TensorInfo:
    """One entry of the header, checked against itself. Raises NextnError."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = DTYPE_BITS[dtype]
    except (TypeError, KeyError, ValueError):
        raise NextnError(f"The header of {name} describes {key[:80]!r} in a form that is not valid.", AGAIN) from None
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        raise NextnError(f"The header of {name} gives {key[:80]!r} no valid shape.", AGAIN)
    elements = 1
    for n in (begin, end, *shape):
        if type(n) is not int or n < 0 or n >> 62:
            raise NextnError(f"The header of {name} gives {key[:80]!r} sizes that are not whole numbers.", AGAIN)
    for n in shape:
        elements *= n
    if end < begin or (elements * bits + 7) // 8 != end - begin:
        raise NextnError(
            f"In {name}, {key[:80]!r} has shape {shape} of {dtype} but {end - begin} bytes of data.", AGAIN
        )
    return TensorInfo(key, dtype, tuple(shape), name, data_start + begin, end - begin)
