"""Ctrl-C and a scheduler's SIGTERM end a run between two steps, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Asked:
    """Which signal asked the run to stop; None: none yet."""

    signal: int | None = None

    def obey(self) -> None:
        """Raise what ends this process with the exit code that shells give for the signal."""
        assert self.signal is not None
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.signal)


@contextmanager
def asked_to_stop() -> Iterator[Asked]:
    """Inside, the first SIGINT or SIGTERM is only written down. Off the main thread signals stay as they are."""
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        asked.signal = number
        for each, handler in before.items():
            signal.signal(each, handler)

    before = {each: signal.getsignal(each) for each in SIGNALS}
    for each in SIGNALS:
        signal.signal(each, note)
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
