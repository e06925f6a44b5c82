"""Read any line of JSONL files without holding them: an index of where lines begin, and one read a line."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from nextn.errors import NextnError
from nextn.train.samples import file_identity

BLOCK_BYTES = 16 << 20
SUFFIXES = (".jsonl", ".jsonl.gz")


class Lines:
    """The lines of several files, as one sequence in the order of the files; 8 bytes of memory a line.

    A ``.gz`` file is unpacked once to a temporary file, since it cannot be read from the middle.

    Args:
        files: files, or folders whose ``.jsonl`` and ``.jsonl.gz`` files are taken in order of their names.
    Raises:
        NextnError: a file that is not there, cannot be read, or no file at all.
    """

    def __init__(self, files: Sequence[str | Path]) -> None:
        self.paths = _expand(files)
        self._files: list[BinaryIO] = []
        self._starts: list[npt.NDArray[np.int64]] = []
        for path in self.paths:
            try:
                file = _unpacked(path) if path.suffix == ".gz" else path.open("rb")
                self._files.append(file)
                self._starts.append(_index(file))
            except (OSError, EOFError, zlib.error) as error:
                reason = getattr(error, "strerror", None) or "not a whole gzip file"
                raise NextnError(f"{path} cannot be read: {reason}.", "Check the file.") from None
        self._first = np.cumsum([0] + [len(starts) - 1 for starts in self._starts])

    @cached_property
    def identity(self) -> str:
        """Of the files' contents in their order, not of their names."""
        return " ".join(file_identity(file) for file in self._files)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, number: int) -> bytes:
        """Line `number`, counted over all files from 0, without its line end."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        which, at = self._place(number)
        start, stop = self._starts[which][at : at + 2]
        return os.pread(self._files[which].fileno(), int(stop - start), int(start)).rstrip(b"\r\n")

    def where(self, number: int) -> str:
        """``file:line`` as editors count."""
        which, at = self._place(number)
        return f"{self.paths[which]}:{at + 1}"

    def _place(self, number: int) -> tuple[int, int]:
        which = int(np.searchsorted(self._first, number, side="right")) - 1
        return which, number - int(self._first[which])


def _expand(files: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for name in files:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES))
            if not inside:
                raise NextnError(f"{path} holds no .jsonl file.", "Name the data files, or another folder.")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise NextnError(f"There is no data file {path}.", "Check the path.")
    if not found:
        raise NextnError("No data file is named.", "Give at least one JSONL file.")
    return found


def _unpacked(path: Path) -> BinaryIO:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - kept open as long as the lines are read
    with gzip.open(path, "rb") as packed:
        shutil.copyfileobj(packed, file, BLOCK_BYTES)
    file.flush()
    return file


def _index(file: BinaryIO) -> npt.NDArray[np.int64]:
    """Where each line begins, and the end of the file: one entry more than there are lines.

    The first begins behind a byte order mark, which some editors put there.
    """
    file.seek(0)
    marked = file.read(len(BOM_UTF8)) == BOM_UTF8
    starts = [np.array([len(BOM_UTF8) if marked else 0], np.int64)]
    offset = 0
    last = b"\n"
    file.seek(0)
    while block := file.read(BLOCK_BYTES):
        starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")).astype(np.int64) + offset + 1)
        offset += len(block)
        last = block[-1:]
    if last != b"\n":
        starts.append(np.array([offset], np.int64))
    return np.concatenate(starts)
