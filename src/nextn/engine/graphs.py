"""Rounds as CUDA graphs: verify, accept, extend and all draft steps in one launch, read one round late.

For each bucket of batch size, K and kind of sampling one graph is captured over fixed tensors. `launch` replays it
and queues the copy of its tokens to the host; `collect` waits for the oldest copy. The caller launches the next round
before it collects the last one's tokens, so the GPU does not wait for the host. Padded sequences work on a page and a
slot of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from nextn.engine.batch import Batch, widened
from nextn.engine.cache import Cache
from nextn.engine.executor import HostRound, host_round, listed
from nextn.engine.logits import SamplingState, power_of_two
from nextn.engine.params import SamplingParams
from nextn.engine.request import TokenLogprob
from nextn.engine.round import decode_round
from nextn.engine.runner import Runner
from nextn.engine.sampling import token_logprobs

IN_FLIGHT = 2
"""Rounds launched and not collected, at most."""


class Captured:
    """One graph and the tensors it reads and writes.

    Args:
        runner, cache: what rounds run on.
        size: sequences in the bucket.
        example: a batch of the same K and plan, whose tensors give widths and dtypes.
        page, slot: scratch for padded sequences.
        pool: memory pool shared by all graphs.
    """

    def __init__(
        self, runner: Runner, cache: Cache, size: int, example: Batch, page: int, slot: int, pool: Any
    ) -> None:
        self.runner, self.cache, self.size, self.page, self.slot = runner, cache, size, page, slot
        device = cache.device
        self.active = torch.zeros(size, dtype=torch.int64, device=device)
        self.state = self._padded(example)
        self._clear()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Compiles kernels and settles library workspaces, on scratch alone.
            self._round()
            self._clear()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.out = self._round()

    def load(self, batch: Batch) -> None:
        """Take over a batch of at most `size` sequences; the rest is padding."""
        _copy(self._padded(batch), self.state)
        self.active.zero_()
        self.active[: batch.size] = 1
        self._clear(batch.size)

    def unload(self, size: int) -> Batch:
        """The first `size` sequences as they are after the rounds launched so far."""
        batch = self.state.keep(list(range(size)))
        batch.sampling = replace(batch.sampling)
        return batch

    def _round(self) -> tuple[Tensor, Tensor]:
        """Run a round on the fixed tensors and leave its state in them.

        Returns:
            [size, (K + 1) + 1 + K + 1 + (K + 1) * reported] int64: tokens, accepted, drafts, broken, ids to report;
            [size, K + 1, 1 + reported] float32: log probabilities of each token and of those ids. The last and the
            second tensor are empty where no request asks.
        """
        work = replace(self.state)
        result = decode_round(self.runner, self.cache, work)
        outcome = result.outcome
        logs = result.logits.new_empty(0, dtype=torch.float32)
        if work.sampling.plan.reported is not None:
            chosen, ids, best = token_logprobs(result.logits, result.tokens, work.sampling.plan.reported)
            outcome = torch.cat((outcome, ids.flatten(1)), 1)
            logs = torch.cat((chosen[..., None], best), -1)
        work.lengths, work.committed = torch._foreach_mul([work.lengths, work.committed], [self.active] * 2)
        _copy(work, self.state, sampling=False)
        return outcome, logs

    def _clear(self, first: int = 0) -> None:
        """Point the sequences from `first` on at scratch."""
        state = self.state
        state.lengths[first:] = 0
        state.committed[first:] = 0
        state.table[first:] = self.page
        state.slots[first:] = self.slot

    def _padded(self, batch: Batch) -> Batch:
        """As many sequences as the bucket has, the first again and again, with tensors as wide as the graph's."""
        batch = batch.keep([*range(batch.size), *[0] * (self.size - batch.size)])
        sampling = batch.sampling.fitted(batch.sampling.widths)
        return replace(batch, table=widened(batch.table, self.cache.table_width), sampling=sampling, bound=0)


def _copy(source: Batch, to: Batch, *, sampling: bool = True) -> None:
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for name in ("lengths", "bonus", "drafts", "draft_probs", "committed", "head_out", "head_hidden"):
        value = getattr(source, name)
        if value is not None and value.numel():
            ours, theirs = pairs.setdefault(value.dtype, ([], []))
            ours.append(getattr(to, name))
            theirs.append(value)
    for ours, theirs in pairs.values():
        torch._foreach_copy_(ours, theirs)
    if sampling:
        to.table.copy_(source.table)
        to.slots.copy_(source.slots)
        to.sampling.params = source.sampling.params
        for f in fields(SamplingState):
            value = getattr(source.sampling, f.name)
            if isinstance(value, Tensor):
                getattr(to.sampling, f.name).copy_(value)


class GraphExecutor:
    """Runs the rounds of a changing batch as graphs.

    Args:
        runner, cache: what rounds run on; one page and one slot of the cache are kept for padding.
    """

    ahead = 1

    def __init__(self, runner: Runner, cache: Cache) -> None:
        self.runner, self.cache = runner, cache
        pages, self.slot = cache.take(1)
        self.page = pages[0]
        self.pool = torch.cuda.graph_pool_handle()
        self.captured: dict[tuple[object, ...], Captured] = {}
        self.now: Captured | None = None
        self.size = 0
        self.flight: deque[tuple[torch.cuda.Event, Tensor, Tensor, tuple[SamplingParams, ...], int]] = deque()
        self.free: list[Tensor] = []

    @torch.inference_mode()
    def load(self, batch: Batch) -> None:
        """Make a batch the one that rounds run on; its tensors are copied."""
        size = power_of_two(batch.size)
        plan = replace(batch.sampling.plan, largest=0)
        key = (
            size,
            batch.draft_tokens,
            plan,
            batch.draft_probs is None,
            batch.head_out is None,
            batch.sampling.widths,
        )
        if key not in self.captured:
            self.captured[key] = Captured(self.runner, self.cache, size, batch, self.page, self.slot, self.pool)
        self.now, self.size = self.captured[key], batch.size
        self.now.load(batch)

    @torch.inference_mode()
    def place(self, table: Tensor) -> None:
        """Give the loaded sequences another page table [batch, n]: each has grown."""
        assert self.now is not None
        self.now.state.table[: self.size, : table.shape[1]] = table

    @torch.inference_mode()
    def launch(self, bound: int = 0) -> None:
        """Start a round; the host goes on. Graphs look at every sequence's own length, not at a bound."""
        assert self.now is not None
        assert len(self.flight) < IN_FLIGHT
        self.now.graph.replay()
        host, logs = (self._copied(out) for out in self.now.out)
        event = torch.cuda.Event()
        event.record()
        state = self.now.state
        self.flight.append((event, host, logs, state.sampling.params[: self.size], state.draft_tokens))

    def collect(self) -> HostRound:
        """Wait for the oldest round launched and bring its outcome to the host."""
        event, host, logs, params, k = self.flight.popleft()
        event.synchronize()
        rows: Sequence[list[int]] = host[: len(params)].tolist()
        logprobs: list[list[TokenLogprob]] = [[] for _ in params]
        if logs.numel():
            ids = host[: len(params), 2 * k + 3 :].unflatten(1, (k + 1, logs.shape[2] - 1))
            for row, asked in enumerate(params):
                if asked.logprobs is not None:
                    found = (logs[row, :, 0], ids[row], logs[row, :, 1:])
                    logprobs[row] = listed(asked, rows[row][: k + 1], *(t.tolist() for t in found))
        self.free += [host, logs]
        return host_round(rows, k, logprobs)

    def _copied(self, out: Tensor) -> Tensor:
        """Queue the copy of a result into pinned memory."""
        at = next((i for i, h in enumerate(self.free) if h.shape == out.shape and h.dtype == out.dtype), None)
        host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True) if at is None else self.free.pop(at)
        return host.copy_(out, non_blocking=True)

    @torch.inference_mode()
    def unload(self) -> Batch:
        """The batch as the rounds launched so far leave it."""
        assert self.now is not None
        return self.now.unload(self.size)
