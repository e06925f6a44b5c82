"""What runs the rounds of a changing batch: the interface that schedulers use, and eager execution behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.params import SamplingParams
from nextn.engine.request import TokenLogprob
from nextn.engine.round import RoundResult, decode_round
from nextn.engine.runner import Runner
from nextn.engine.sampling import token_logprobs


@dataclass(frozen=True, slots=True)
class HostRound:
    """A round's outcome on the host, a row a sequence.

    Attributes:
        tokens: [batch][K + 1]; the first accepted + 1 are new.
        accepted: [batch].
        drafts: [batch][K], what was verified.
        broken: [batch], logits held NaN, or nothing finite to choose from.
        logprobs: [batch][K + 1], of the tokens; empty for a request that asks for none.
    """

    tokens: list[list[int]]
    accepted: list[int]
    drafts: list[list[int]]
    broken: list[bool]
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)


def to_host(result: RoundResult, params: Sequence[SamplingParams]) -> HostRound:
    """Wait for a result and bring it over, with what the requests of `params` want reported."""
    rows = result.outcome.tolist()
    asking = [row for row, p in enumerate(params) if p.logprobs is not None]
    logprobs: list[list[TokenLogprob]] = [[] for _ in params]
    if asking:
        most = max(p.logprobs for p in params if p.logprobs is not None)
        found = token_logprobs(result.logits[asking], result.tokens[asking], most)
        for row, *values in zip(asking, *(t.tolist() for t in found), strict=True):
            logprobs[row] = listed(params[row], rows[row][: result.tokens.shape[1]], *values)
    return host_round(rows, result.drafts.shape[1], logprobs)


def host_round(rows: Sequence[list[int]], k: int, logprobs: list[list[TokenLogprob]]) -> HostRound:
    """Take apart what `sampling.settle` laid side by side; what follows in a row is left."""
    return HostRound(
        [row[: k + 1] for row in rows],
        [row[k + 1] for row in rows],
        [row[k + 2 : 2 * k + 2] for row in rows],
        [bool(row[2 * k + 2]) for row in rows],
        logprobs,
    )


def listed(
    params: SamplingParams, tokens: list[int], chosen: list[float], ids: list[list[int]], logs: list[list[float]]
) -> list[TokenLogprob]:
    """One row of `sampling.token_logprobs`, as many of the most probable ids as the request asks for."""
    return [
        TokenLogprob(token, log, tuple(zip(best[: params.logprobs], best_logs[: params.logprobs], strict=True)))
        for token, log, best, best_logs in zip(tokens, chosen, ids, logs, strict=True)
    ]


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
        self.results: deque[tuple[RoundResult, tuple[SamplingParams, ...]]] = deque()

    def load(self, batch: Batch) -> None:
        self.batch = batch

    def place(self, table: Tensor) -> None:
        assert self.batch is not None
        self.batch.table = table

    def launch(self, bound: int) -> None:
        assert self.batch is not None
        self.batch.bound = bound
        self.results.append((decode_round(self.runner, self.cache, self.batch), self.batch.sampling.params))

    def collect(self) -> HostRound:
        return to_host(*self.results.popleft())

    def unload(self) -> Batch:
        assert self.batch is not None
        return self.batch
