"""Read a run's batches ahead of its steps, on a thread, so that the device does not wait for tokenising and packing."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from nextn.train.source import Source
from nextn.train.step import Item

BATCHES = 8
"""Read ahead: half of what one window of `data` gives at once."""

Read = tuple[Item, dict[str, Any], dict[str, Any]]
"""A batch, and the position and the report behind it."""


class Ahead:
    """A source whose next batches are made while the last are used; its position is that of the batches given out.

    Args:
        source: read by nobody else from then on.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._pending: deque[Future[Read]] = deque()
        self._state, self._report = source.state_dict(), source.report()

    def take(self) -> Item:
        while len(self._pending) <= BATCHES:
            self._pending.append(self._pool.submit(self._read))
        item, self._state, self._report = self._pending.popleft().result()
        return item

    def id_counts(self, vocab: int) -> Tensor:
        return self.source.id_counts(vocab)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drop()
        self.source.load_state_dict(state)
        self._state, self._report = self.source.state_dict(), self.source.report()

    def report(self) -> dict[str, Any]:
        return self._report

    def close(self) -> None:
        """Read no further."""
        self._drop()
        self._pool.shutdown()

    def _drop(self) -> None:
        for future in self._pending:
            future.cancel()
        while self._pending:
            last = self._pending.popleft()
            if not last.cancelled():
                last.exception()

    def _read(self) -> Read:
        item = self.source.take()
        return item, self.source.state_dict(), self.source.report()
