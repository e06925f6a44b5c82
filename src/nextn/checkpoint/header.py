"""The header of a safetensors file: parsed and checked without reading weights.

Format: 8 bytes little-endian header length, that many bytes of JSON, then the data; byte ranges count from the end
of the header (huggingface/safetensors, README "Format"). Nothing is allocated from a length field that the file
cannot hold.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from nextn.checkpoint.tensors import DTYPE_BITS, TensorInfo
from nextn.errors import NextnError

MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library itself enforces."""


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


def _header_bytes(file: BinaryIO, size_bytes: int, path: Path) -> bytes:
    first = file.read(8)
    if len(first) < 8:
        raise NextnError(f"{path} is only {size_bytes} bytes long, no safetensors file.", "Download it again.")
    (length,) = struct.unpack("<Q", first)
    if length > MAX_HEADER_BYTES or length + 8 > size_bytes:
        raise NextnError(
            f"{path} claims a header of {length} bytes in a file of {size_bytes} bytes.",
            "It is truncated or not a safetensors file; download it again.",
        )
    return file.read(length)


def parse_header(raw: bytes, size_bytes: int, name: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parse header JSON (without the 8 length bytes) of a file of `size_bytes` bytes.

    Raises:
        NextnError: not JSON, an unknown dtype, or a byte range that does not fit shape or file.
    """
    bad = "Download or export it again."
    try:
        header: Any = json.loads(raw)
    except (ValueError, RecursionError):
        raise NextnError(f"The header of {name} is not valid JSON.", bad) from None
    if not isinstance(header, dict):
        raise NextnError(f"The header of {name} is not a JSON object.", bad)
    data_start = 8 + len(raw)
    room = size_bytes - data_start
    metadata = header.pop("__metadata__", {})
    tensors: dict[str, TensorInfo] = {}
    for key, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, begin, end]
            bits = DTYPE_BITS[dtype]
        except (TypeError, KeyError, ValueError):
            raise NextnError(f"The header of {name} describes {key[:80]!r} in a form that is not valid.", bad) from None
        if not isinstance(shape, list) or any(type(n) is not int or n < 0 or n >> 62 for n in numbers):
            raise NextnError(f"The header of {name} gives {key[:80]!r} sizes that are not whole numbers.", bad)
        elements = 1
        for n in shape:
            elements *= n
        if end < begin or (elements * bits + 7) // 8 != end - begin:
            raise NextnError(
                f"In {name}, {key[:80]!r} has shape {shape} of {dtype} but {end - begin} bytes of data.", bad
            )
        if end > room:
            raise NextnError(
                f"{name} is truncated: {key[:80]!r} ends {end - room} bytes past the end of the file.", bad
            )
        tensors[key] = TensorInfo(key, dtype, tuple(shape), name, data_start + begin, end - begin)
    if not isinstance(metadata, dict):
        metadata = {}
    return tensors, {str(k): str(v) for k, v in metadata.items()}
