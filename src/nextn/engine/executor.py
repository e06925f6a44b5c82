"""What runs the rounds of a changing batch: the interface that schedulers use, and eager execution behind it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.round import RoundResult, decode_round
from nextn.engine.runner import Runner


@dataclass(frozen=True, slots=True)
class HostRound:
    """A round's outcome on the host, a row a sequence.

    Attributes:
        tokens: [batch][K + 1]; the first accepted + 1 are new.
        accepted: [batch].
        drafts: [batch][K], what was verified.
        broken: [batch], logits held NaN.
        logits: [batch, K + 1, vocab] of the target, on its device; None where no request asks for log probabilities.
    """

    tokens: list[list[int]]
    accepted: list[int]
    drafts: list[list[int]]
    broken: list[bool]
    logits: Tensor | None = None


def to_host(result: RoundResult) -> HostRound:
    """Wait for a result and bring it over."""
    return HostRound(
        result.tokens.tolist(),
        result.accepted.tolist(),
        result.drafts.tolist(),
        result.broken.tolist(),
        result.logits,
    )


class Executor(Protocol):
    """Rounds in the order of their launches; work on the same caches queued between launches runs between them."""

    ahead: int
    """Rounds to have launched when the oldest is collected, beyond that one: 0 reads each before the next."""

    def load(self, batch: Batch) -> None:
        """Make a batch the one that rounds run on, its K included."""
        ...

    def place(self, table: Tensor) -> None:
        """Give the loaded sequences another page table [batch, n]: each has grown."""
        ...

    def launch(self, bound: int) -> None:
        """Start a round; `bound` is at least every sequence's length."""
        ...

    def collect(self) -> HostRound:
        """The oldest round that was not collected, once it is done."""
        ...

    def unload(self) -> Batch:
        """The batch as the rounds launched so far leave it."""
        ...


class EagerExecutor:
    """Runs each round where it is launched.

    Args:
        ahead: 1 hands results over as late as an executor that launches ahead.
    """

    def __init__(self, runner: Runner, cache: Cache, ahead: int = 0) -> None:
        self.runner, self.cache, self.ahead = runner, cache, ahead
        self.batch: Batch | None = None
        self.results: deque[RoundResult] = deque()

    def load(self, batch: Batch) -> None:
        self.batch = batch

    def place(self, table: Tensor) -> None:
        assert self.batch is not None
        self.batch.table = table

    def launch(self, bound: int) -> None:
        assert self.batch is not None
        self.batch.bound = bound
        self.results.append(decode_round(self.runner, self.cache, self.batch))

    def collect(self) -> HostRound:
        return to_host(self.results.popleft())

    def unload(self) -> Batch:
        assert self.batch is not None
        return self.batch
