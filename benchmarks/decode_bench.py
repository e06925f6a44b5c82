"""Time rounds, steps and prompts of one model at one batch size, by the engine's own runner and executor.

A round is launched and collected as the engine does it, one ahead; there is no scheduler, no stop and no text.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks import with_triton  # noqa: F401
from benchmarks.decode_setup import CUDA, GREEDY, batch_of
from benchmarks.geometries import VOCAB
from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.fused import FusedRunner
from nextn.engine.graphs import GraphExecutor
from nextn.engine.prefill import prefill
from nextn.engine.sampling import SamplingParams, SamplingState
from nextn.models.decoder import Decoder, Drafter

ROUNDS = 24
"""Launched one behind the other for one time."""


class Forced(FusedRunner):
    """Test-only: every sequence accepts exactly `accepted` draft tokens, whatever they are."""

    accepted = 0

    def accept_best(self, logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, accepted, broken = super().accept_best(logits, drafts)
        return tokens, accepted.fill_(self.accepted), broken


def measure(executor: GraphExecutor, batch: Batch, repeats: int) -> float:
    """Median milliseconds of a launch, rounds queued back to back as the engine queues them."""
    executor.load(batch)
    times = []
    for _ in range(repeats + 1):
        executor.load(batch)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        executor.launch()
        start.record()
        for _ in range(ROUNDS):
            executor.launch()
            executor.collect()
        end.record()
        executor.collect()
        end.synchronize()
        times.append(start.elapsed_time(end) / ROUNDS)
    return statistics.median(times[1:])


class Bench:
    """One geometry at one batch size.

    Args:
        model, cache: random.
        size, context: sequences and their cached positions.
        capture_only: compile and capture, time nothing.

    Attributes:
        repeats: of which the median is taken.
    """

    def __init__(self, model: Decoder, cache: Cache, size: int, context: int, *, capture_only: bool = False) -> None:
        self.model, self.cache, self.size, self.context = model, cache, size, context
        self.capture_only = capture_only
        self.repeats = 7

    def time(
        self,
        k: int,
        *,
        head: bool = True,
        draft: Drafter | None = None,
        forced: int | None = None,
        params: SamplingParams = GREEDY,
        **options: Any,
    ) -> float:
        """Milliseconds of a round at K (0: a step)."""
        kind = FusedRunner if forced is None else Forced
        runner = kind(self.model, draft or self.model, self.cache, longest=self.context + 600, **options)
        if isinstance(runner, Forced):
            assert forced is not None
            runner.accepted = forced
        taken = list(self.cache.free_pages), list(self.cache.free_slots)
        executor = GraphExecutor(runner, self.cache)
        batch = batch_of(self.model, self.cache, self.size, self.context, k, head=head, params=params)
        if self.capture_only:
            executor.load(batch)
        ms = 0.0 if self.capture_only else measure(executor, batch, self.repeats)
        self.cache.free_pages, self.cache.free_slots = taken
        return ms

    def prefill(self, chunk: int) -> float:
        """Milliseconds of the host's clock from a prompt of `context` tokens to its first token and first draft."""
        runner = FusedRunner(self.model, self.model, self.cache, longest=self.context + 600)
        prompt = torch.randint(0, VOCAB, (self.context,)).tolist()
        times = []
        for _ in range(2 if self.capture_only else self.repeats + 1):
            pages, slot = self.cache.take(self.context + 1)
            sampling = SamplingState.build([GREEDY], [prompt], vocab_size=VOCAB, device=CUDA)
            torch.cuda.synchronize()
            began = time.perf_counter()
            prefill(runner, self.cache, [prompt], [pages], [slot], sampling, k=1, chunk=chunk)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
            self.cache.give_back(pages, slot)
        return statistics.median(times[1:])
