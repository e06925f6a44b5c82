"""How many draft tokens the next round takes: what a scheduler asks, and the answer that never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Observed:
    """A round that was run.

    Attributes:
        draft_tokens: K.
        requests, accepted: the sequences that needed it, and the draft tokens that each kept.
        size: sequences in the batch, those included that had ended already.
        seconds: None where other work ran between.
    """

    draft_tokens: int
    requests: Sequence[int]
    accepted: Sequence[int]
    size: int
    seconds: float | None


@runtime_checkable
class DraftLength(Protocol):
    """Chooses K for each round of a batch."""

    most: int
    """The largest K that `choose` returns."""

    def choose(self, requests: Sequence[int]) -> int:
        """K for the next round of these requests."""
        ...

    def observe(self, seen: Observed) -> None:
        """Learn from a round."""
        ...

    def forget(self, request: int) -> None:
        """A request is over."""
        ...


class FixedLength:
    """Always the same K."""

    def __init__(self, draft_tokens: int) -> None:
        self.most = draft_tokens

    def choose(self, requests: Sequence[int]) -> int:
        return self.most

    def observe(self, seen: Observed) -> None:
        """Nothing to learn."""

    def forget(self, request: int) -> None:
        """Nothing was kept."""
