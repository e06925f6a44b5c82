"""Show how far a long work is: a bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

QUIET_SECONDS = 2.0
"""Work faster than this shows nothing."""
LINE_SECONDS = 10.0


class Progress:
    """A counter that draws itself while the block runs.

    Args:
        label: what is done, as in ``judging``.
        unit: what is counted.
        total: None where it is not known.
        out: where to draw.
    """

    def __init__(self, label: str, unit: str, total: int | None, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.label, self.unit, self.total, self.out = label, unit, total, out
        self._console = Console(file=out)
        self._bar = Bar(
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(label, total=total, unit=unit, note="")
        self._started = self._last = time.monotonic()
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            self._bar.stop()

    def at(self, done: int, note: str = "") -> None:
        """So much is done now."""
        now = time.monotonic()
        if now - self._started < QUIET_SECONDS:
            return
        if self._console.is_terminal:
            if not self._drawn:
                self._bar.start()
                self._drawn = True
            self._bar.update(self._task, completed=done, note=note)
        elif now - self._last >= LINE_SECONDS:
            self._last = now
            of = f" of {self.total}" if self.total else ""
            print(f"{self.label}: {done}{of} {self.unit} {note}".rstrip(), file=self.out, flush=True)

    def of(self, done: int, total: int) -> None:
        """`at`, for callers that tell the total every time."""
        self.at(done)
