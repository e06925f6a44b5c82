"""Make a process die, or its disk be full, at a chosen call into the file system.

``kill`` is SIGKILL before call number `at`, counted from 1; ``full`` is ENOSPC from that call on, for calls that take
room; ``count`` only counts. Every call that changes the disk counts.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

CHANGING = ("mkdir", "link", "symlink", "write", "copy_file_range", "fsync", "rename", "replace", "unlink", "rmdir")
TAKING_ROOM = ("mkdir", "link", "symlink", "write", "copy_file_range", "fsync")


def inject(kind: str, at: int) -> list[int]:
    """Wrap os's functions; returns the running count."""
    count = [0]

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "write" and args[0] in (1, 2):
                return real(*args, **kwargs)
            count[0] += 1
            if kind == "kill" and count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "full" and count[0] >= at and name in TAKING_ROOM:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return wrapped

    real_open = os.open

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            count[0] += 1
            if kind == "kill" and count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "full" and count[0] >= at:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real_open(path, flags, *args, **kwargs)

    for name in CHANGING:
        setattr(os, name, wrap(name, getattr(os, name)))
    os.open = opened
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    return count
