"""Hold a run's folder for one process: two runs that write into one folder would mix their steps."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from nextn.errors import NextnError

FILE = "lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made if need be; a killed process lets go of it.

    Where nothing was put there meanwhile, lock and folders that were made go at the end. A file system that knows no
    locks is not held.

    Raises:
        NextnError: another process holds it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    there = set(os.listdir(folder)) if folder.is_dir() else set()
    with _locked(folder):
        try:
            yield
        finally:
            if FILE not in there and folder.is_dir() and set(os.listdir(folder)) == {FILE, *there}:
                (folder / FILE).unlink()
                _remove_empty(made)


def _locked(folder: Path) -> TextIO:
    """The open lock file: closed, it is let go."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FILE).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise NextnError(
                f"Another process is training into {folder.parent}.", "Wait for it, or give another output."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # its holder removed it after it was opened here


def _remove_empty(folders: Sequence[Path]) -> None:
    """Innermost first, up to the first that holds something."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
