"""The engine: requests in, tokens out, round by round, on the host's side of the tensors.

`Engine.rounds` decodes a fixed list of requests, `Engine.scheduler` serves those that come and go. The pool holds what
they need at once, or as much as memory allows; a `Scheduler` does the work. A sequence ends exactly where plain
decoding would end it, also inside an accepted run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from nextn.engine.admission import spare_positions, token_limit
from nextn.engine.budget import cache_size, free_bytes
from nextn.engine.cache import Cache
from nextn.engine.device_errors import device_errors, out_of_memory
from nextn.engine.draft_length import DraftLength, FixedLength
from nextn.engine.draft_vocab import DraftVocab
from nextn.engine.executor import Executor
from nextn.engine.request import Request, Running, Update
from nextn.engine.runner import PlainRunner, Runner
from nextn.engine.scheduler import Scheduler
from nextn.errors import NextnError
from nextn.kernels.support import available
from nextn.models.decoder import Decoder, Drafter
from nextn.options import MAX_CHUNK

MAX_DRAFT_TOKENS = 8
CHUNK = {"cuda": 2048}
"""Prompt positions a prefill forward by device, 512 elsewhere: a GPU takes less time than its host to start 512."""


AT_ONCE = 256
"""Sequences of one list that decode together at most; the others wait for their places."""


@dataclass
class EngineStats:
    """Seconds of an engine's work, and the bytes it holds."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cache_bytes: int = 0


class Engine:
    """Decodes with a target and, unless K is 0, its head.

    Args:
        target: the model, its head inside.
        draft: a separately loaded draft model to use in place of the target's own head.
        draft_tokens: K, 0 to 8, or what chooses it for each round; 0 decodes without the head.
        draft_vocab: ids that can be drafted; None for all.
        chunk: prompt positions a prefill forward, up to 32,768; None for `CHUNK` of the device.
        page_size: positions a cache page.
        fused: run rounds with the fused kernels; None where they can run and cover the model.
        exact: greedy tokens in half precision equal bit for bit with the head on and off, at a cost in speed: a row's
            arithmetic does not depend on the rows beside it, and each prompt runs by itself. Needs the fused kernels.
        graphs: launch each round as one CUDA graph, ahead of reading the last one; None where fused rounds run on a
            GPU.
        cache_bytes: memory that a pool may take; None for what is free (`nextn.engine.budget.free_bytes`).
    """

    def __init__(
        self,
        target: Decoder,
        *,
        draft: Drafter | None = None,
        draft_tokens: int | DraftLength = 3,
        draft_vocab: Iterable[int] | None = None,
        chunk: int | None = None,
        page_size: int = 64,
        fused: bool | None = None,
        graphs: bool | None = None,
        exact: bool = False,
        cache_bytes: int | None = None,
    ) -> None:
        lengths = FixedLength(draft_tokens) if isinstance(draft_tokens, int) and _whole(draft_tokens) else draft_tokens
        if not isinstance(lengths, DraftLength) or not 0 <= lengths.most <= MAX_DRAFT_TOKENS:
            raise NextnError(
                f"draft_tokens is {lengths.most if isinstance(lengths, DraftLength) else repr(lengths)[:40]}.",
                f"Give a whole number from 0 (no head) to {MAX_DRAFT_TOKENS}, or a DraftLength.",
            )
        if cache_bytes is not None and (not _whole(cache_bytes) or cache_bytes < 1):
            raise NextnError(f"cache_bytes is {cache_bytes!r}.", "Give a whole number of 1 or more.")
        drafter = draft if draft is not None else target
        if lengths.most and drafter.mtp is None:
            raise NextnError("The model was loaded without an MTP head.", "Decode without one (`--no-mtp`).")
        device, dtype = target.embed.weight.device, target.embed.weight.dtype
        chunk = chunk if chunk is not None else CHUNK.get(device.type, 512)
        if not _whole(page_size) or page_size < 1:
            raise NextnError(f"page_size is {page_size}.", "Give a whole number of 1 or more.")
        if not _whole(chunk) or not 1 <= chunk <= MAX_CHUNK:
            raise NextnError(f"chunk is {chunk}.", f"Give a whole number from 1 to {MAX_CHUNK}.")
        self.target, self.draft, self.lengths = target, drafter, lengths
        self.vocab: DraftVocab | None = None
        if draft_vocab is not None and lengths.most:
            with device_errors("copying the output projection's rows of the draft vocabulary", "Draft from fewer ids."):
                self.vocab = DraftVocab.gather(drafter, draft_vocab)
        if fused is None:
            fused = available(device) and dtype != torch.float64
        if fused:
            from nextn.engine.fused import FusedRunner

            fused = FusedRunner.supports(target, drafter)
        if exact and not fused:
            raise NextnError(
                "Exact decoding needs the fused kernels, which run on an NVIDIA GPU and cover dense models.",
                "Leave it out (`--exact`): in float32 and float64 greedy tokens are the same without."
                if dtype in (torch.float32, torch.float64)
                else "Leave it out (`--exact`), or decode in float32 (`--dtype float32`).",
            )
        if graphs and device.type != "cuda":
            raise NextnError(f"CUDA graphs do not run on {device.type}.", "Leave graphs out, or load onto a GPU.")
        self.fused, self.exact = fused, exact
        self.graphs = fused and device.type == "cuda" if graphs is None else graphs
        self.chunk, self.page_size, self.cache_bytes = chunk, page_size, cache_bytes
        self.stats = EngineStats()

    def rounds(
        self, requests: Sequence[Request], *, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[list[tuple[Running, Update]]]:
        """Decode requests together.

        Args:
            progress: called with (prompt positions done, in all) during prefill.
        Yields:
            after the prefill and after each round: (sequence, what it gained) for every sequence that took part; one
            whose logits held NaN comes with nothing gained and its `error`, and the others go on.
        Raises:
            NextnError: an empty prompt, one that fits neither the context nor the memory, or a device that fails.
        """
        if not requests:
            return
        spare = spare_positions(self.lengths.most, int(self.graphs))
        rooms = [len(r.prompt) + token_limit(r, self.target.config) + spare for r in requests]
        total, done = sum(len(r.prompt) for r in requests), 0

        def prefilled(rows: int) -> None:
            nonlocal done
            done += rows
            if progress is not None:
                # Prompts of sequences that were paused are computed again.
                progress(min(done, total), total)

        scheduler = self.scheduler(sorted(rooms)[-AT_ONCE:], prompts_first=True, prefilled=prefilled)
        for request in requests:
            scheduler.add(request)
        before = replace(self.stats)
        while not scheduler.idle:
            news = scheduler.step()
            self.stats.prefill_seconds = before.prefill_seconds + scheduler.prefill_seconds
            self.stats.decode_seconds = before.decode_seconds + scheduler.decode_seconds
            yield news

    def scheduler(
        self,
        rooms: Sequence[int],
        *,
        prompts_first: bool = False,
        prefilled: Callable[[int], None] | None = None,
    ) -> Scheduler:
        """A scheduler over a new pool, for requests that come and go.

        Args:
            rooms: positions of the sequences that the pool should hold at once; a sequence may have as many as the
                largest. Where memory holds fewer sequences or positions, requests wait for others, or are paused.
            prompts_first: run arriving prompts whole before the next round, which takes least time in all; else a
                step holds `chunk` rows of prompts beside a round, so that nobody waits for long.
            prefilled: called with the rows of each prefill forward.
        Raises:
            NextnError: no rooms, one beyond the context, or not even the largest fits into memory.
        """
        odd = next((room for room in rooms if not _whole(room) or room < 1), None)
        if odd is not None or not rooms:
            raise NextnError(
                "A pool for no sequence is asked for." if odd is None else f"A sequence of {odd!r} positions is none.",
                "Give the positions of at least one sequence, whole numbers of 1 or more.",
            )
        context = self.target.config.max_positions
        if max(rooms) > (most := context + spare_positions(self.lengths.most, int(self.graphs))):
            raise NextnError(
                f"A sequence of {max(rooms)} positions is asked for; the model's context is {context}.",
                f"Give at most {most}, which leaves room for the rounds behind it.",
            )
        with device_errors("preparing to decode"):
            cache = self._cache(rooms)
            self.stats.cache_bytes = cache.nbytes
            runner = self._runner(cache, max(rooms))
            executor: Executor | None = None
            if self.graphs:
                from nextn.engine.graphs import GraphExecutor

                executor = GraphExecutor(runner, cache)
        return Scheduler(
            runner,
            cache,
            self.lengths,
            executor=executor,
            chunk=self.chunk,
            prompt_rows=None if prompts_first else self.chunk,
            alone=self.exact,
            prefilled=prefilled,
        )

    def _runner(self, cache: Cache, longest: int) -> Runner:
        if self.fused:
            from nextn.engine.fused import FusedRunner

            return FusedRunner(self.target, self.draft, cache, longest=longest, vocab=self.vocab, exact=self.exact)
        return PlainRunner(self.target, self.draft, self.vocab)

    def _cache(self, rooms: Sequence[int]) -> Cache:
        """Pools that hold sequences of so many positions, all at once, or as much of that as memory allows."""
        weight, most = self.target.embed.weight, self.lengths.most
        config = replace(self.target.config, head_layers=self.draft.config.head_layers if most else 0)
        # Graphs keep a page and a sequence for padding.
        padding = int(self.graphs)
        pages = sum(-(-room // self.page_size) for room in rooms) + padding
        sequences = len(rooms) + padding

        def make(device: torch.device, pages: int, sequences: int) -> Cache:
            return Cache(
                config,
                pages=pages,
                page_size=self.page_size,
                sequences=sequences,
                rows=most + 1,
                dtype=weight.dtype,
                device=device,
                replay=self.fused,
            )

        meta = torch.device("meta")
        wanted = make(meta, pages, sequences).nbytes
        budget = self.cache_bytes if self.cache_bytes is not None else free_bytes(weight.device)
        if wanted > budget:
            least = -(-max(rooms) // self.page_size) + padding
            one = make(meta, least, 1 + padding).nbytes
            if one > budget:
                raise _too_large(f"A sequence of {max(rooms)} positions takes", max(rooms), one, budget)
            size = cache_size(
                config,
                budget,
                page_size=self.page_size,
                rows=most + 1,
                sequences=sequences,
                dtype=weight.dtype,
                replay=self.fused,
                least_pages=least,
                least_sequences=1 + padding,
            )
            pages, sequences = min(size.pages, pages), size.sequences
        try:
            return make(weight.device, pages, sequences)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            positions = pages * self.page_size
            raise _too_large(
                f"The caches of {sequences} sequences and {positions} positions take",
                positions,
                make(meta, pages, sequences).nbytes,
                free_bytes(weight.device),
            ) from None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _too_large(what: str, positions: int, wanted: int, free: int) -> NextnError:
    unit, name = (1e9, "GB") if wanted >= 1e9 else (1e6, "MB")
    return NextnError(
        f"{what} {wanted / unit:.2f} {name}; {free / unit:.2f} {name} are free, enough for about "
        f"{int(positions * free / wanted)} positions.",
        "Lower max_tokens, the number of prompts at once or draft_tokens, or free memory that others hold.",
    )
