"""Compare what executors bring to the host, log probabilities to rounding; guard what is not theirs to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from nextn.engine.batch import Batch
from nextn.engine.executor import HostRound
from nextn.engine.graphs import GraphExecutor


def assert_alike(got: Sequence[HostRound], expected: Sequence[HostRound]) -> None:
    assert [replace(r, logprobs=[]) for r in got] == [replace(r, logprobs=[]) for r in expected]
    mine, theirs = ([p for r in rounds for row in r.logprobs for p in row] for rounds in (got, expected))
    assert [len(row) for r in got for row in r.logprobs] == [len(row) for r in expected for row in r.logprobs]
    assert [p.token for p in mine] == [p.token for p in theirs]
    assert [[i for i, _ in p.top] for p in mine] == [[i for i, _ in p.top] for p in theirs]
    for a, b in ((a, b) for a, b in zip(mine, theirs, strict=True)):
        assert [a.logprob, *(v for _, v in a.top)] == pytest.approx([b.logprob, *(v for _, v in b.top)], abs=1e-4)


def fill_outside(executor: GraphExecutor, batch: Batch, sequences: int) -> Callable[[], None]:
    """Fill the pages and slots of sequences outside a batch, the first ones among them, with random values.

    Returns:
        a check that they still hold them.
    """
    cache = executor.cache
    owned = {*batch.table.flatten().tolist(), executor.page}
    pages = [p for p in range(cache.k.shape[1]) if p not in owned]
    slots = [s for s in range(sequences) if s not in {*batch.slots.tolist(), executor.slot}]
    assert pages[0] == slots[0] == 0
    logs = [t[None] for log in cache.logs for t in (log.k, log.u, log.g)]
    guarded = [(p, pages) for p in (cache.k, cache.v, cache.draft_k, cache.draft_v)]
    guarded += [(p, slots) for p in (cache.states, cache.conv, *logs)]
    kept = []
    for pool, at in guarded:
        kept.append(torch.randn_like(pool[:, at]))
        pool[:, at] = kept[-1]

    def check() -> None:
        assert all(torch.equal(pool[:, at], then) for (pool, at), then in zip(guarded, kept, strict=True))

    return check
