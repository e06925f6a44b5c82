"""Safetensors files for tests: real headers over sparse data, so that a 70 GB geometry takes no room on disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1, "I64": 8}


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, Any], int]:
    """Header and length of the data for key -> (dtype, shape)."""
    header: dict[str, Any] = {}
    at = 0
    for key, (dtype, shape) in tensors.items():
        count = BYTES[dtype]
        for n in shape:
            count *= n
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + count]}
        at += count
    return header, at


def write_raw(path: Path, header: bytes, data_bytes: int) -> None:
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + data_bytes)


def write_sparse(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    header, size = header_of(tensors)
    write_raw(path, json.dumps(header).encode(), size)


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(weight_map)}))
