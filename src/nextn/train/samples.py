"""Tell files apart by samples of their bytes, without reading them whole. No torch here."""

from __future__ import annotations

import hashlib
import os
from typing import BinaryIO

FILE_SAMPLES, FILE_BYTES = 64, 4096


def file_identity(file: BinaryIO) -> str:
    """Of an open file's size and contents; one of up to FILE_SAMPLES x FILE_BYTES bytes is read whole."""
    size = os.fstat(file.fileno()).st_size
    digest = hashlib.sha256(str(size).encode())
    for sample in samples(file, 0, size, FILE_SAMPLES, FILE_BYTES):
        digest.update(sample)
    return digest.hexdigest()[:16]


def samples(file: BinaryIO, start: int, length: int, count: int, width: int) -> list[bytes]:
    """`count` pieces of `width` bytes, spread from the first byte to the last; all bytes where they cover them."""
    if length <= count * width:
        return [os.pread(file.fileno(), length, start)]
    step = (length - width) / (count - 1)
    return [os.pread(file.fileno(), width, start + round(i * step)) for i in range(count)]
