"""Count accepted drafts by position, context length and domain: numerators and denominators, divided at the end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

BUCKETS = (128, 512, 2048, 8192, 32768, 131072)
"""Upper ends of the context-length buckets, in tokens."""


@dataclass
class Counts:
    """Rounds, and in how many of them each draft was kept.

    Attributes:
        rounds: verifies counted (an expected number where texts are walked at a temperature).
        kept: entry i - 1: rounds in which d1..di were all accepted (an expected number at a temperature).
    """

    rounds: float
    kept: list[float]

    @property
    def acceptance(self) -> list[float]:
        """By position; empty at 0 rounds."""
        return [k / self.rounds for k in self.kept] if self.rounds else []

    @property
    def accept_length(self) -> float | None:
        """Tokens gained a verify, the bonus included; None at 0 rounds."""
        return 1 + sum(self.kept) / self.rounds if self.rounds else None

    def merge(self, other: Counts) -> None:
        """Add what another process counted."""
        self.rounds += other.rounds
        self.kept = [a + b for a, b in zip(self.kept, other.kept, strict=True)]

    def as_json(self) -> dict[str, Any]:
        return {"accept_length": self.accept_length, "acceptance": self.acceptance, "rounds": self.rounds}


@dataclass
class Acceptance:
    """Counts in all, and by group.

    Args:
        draft_tokens: K.
        edges: upper ends of the buckets, ascending; one more bucket holds what is longer.
    """

    draft_tokens: int
    edges: Sequence[int] = BUCKETS
    total: Counts = field(init=False)
    buckets: dict[int, Counts] = field(init=False, default_factory=dict)
    domains: dict[str, Counts] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.total = self._empty()

    def add(self, kept: Tensor, lengths: Tensor, domains: Sequence[str], rounds: Sequence[float] = ()) -> None:
        """Count rounds.

        Args:
            kept: [rounds, K], 1 (or the probability) where the drafts up to there were all accepted.
            lengths: [rounds], tokens known when drafting, the bonus included.
            domains: tag of each round, "" for none.
            rounds: how often each is expected; once if not given.
        """
        rows = kept.double().tolist()
        for row, length, domain, often in zip(rows, lengths.tolist(), domains, rounds or [1] * len(rows), strict=True):
            groups = [self.total, self.buckets.setdefault(bisect_left(self.edges, length), self._empty())]
            if domain:
                groups.append(self.domains.setdefault(domain, self._empty()))
            for group in groups:
                group.rounds += often
                for i, k in enumerate(row):
                    group.kept[i] += often * k

    def merge(self, other: Acceptance) -> None:
        """Add what another process counted."""
        self.total.merge(other.total)
        for bucket, counts in other.buckets.items():
            self.buckets.setdefault(bucket, self._empty()).merge(counts)
        for name, counts in other.domains.items():
            self.domains.setdefault(name, self._empty()).merge(counts)

    def _empty(self) -> Counts:
        return Counts(0, [0.0] * self.draft_tokens)

    def as_json(self) -> dict[str, Any]:
        """``accept_length``, ``acceptance``, ``rounds``; ``buckets``, a list by length; ``domains`` by tag."""
        buckets = []
        for at, counts in sorted(self.buckets.items()):
            above = self.edges[at - 1] + 1 if at else 0
            to = self.edges[at] if at < len(self.edges) else None
            buckets.append({"from": above, "to": to, **counts.as_json()})
        domains = {name: counts.as_json() for name, counts in sorted(self.domains.items())}
        return {**self.total.as_json(), "buckets": buckets, "domains": domains}
