"""A progress bar on a terminal while weights load; plain lines elsewhere when it takes long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from nextn.models.load import Progress

QUIET_SECONDS = 2.0
"""Loads faster than this show nothing."""


@contextmanager
def loading(out: TextIO) -> Iterator[Progress]:
    """A callback (bytes read, bytes in all) that draws while the block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    started = last = time.monotonic()
    console = Console(file=out)
    bar = Bar(
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("load", total=None)
    running = False

    def show(done: int, total: int) -> None:
        nonlocal running, last
        now = time.monotonic()
        if now - started < QUIET_SECONDS:
            return
        if console.is_terminal:
            if not running:
                bar.start()
                running = True
            bar.update(task, completed=done, total=total)
        elif now - last > 10:
            last = now
            print(f"loading weights: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", file=out, flush=True)

    try:
        yield show
    finally:
        if running:
            bar.stop()
