"""Hold a run's folder for one process: two runs that write into one folder would mix their steps."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nextn.errors import NextnError

FILE = "lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made if need be; a killed process lets go of it.

    A file system that knows no locks is not held.

    Raises:
        NextnError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NextnError(
                f"Another process is training into {folder.parent}.", "Wait for it, or give another output."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield
