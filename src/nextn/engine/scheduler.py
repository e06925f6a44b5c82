"""Continuous batching: requests come and go between rounds, and share pages of a pool that may be too small for all.

A step runs one round for the sequences that decode, then a budget of prompt rows for those that arrive. Pages are
taken as sequences grow. When they run out, the sequence that arrived last is paused: its pages are freed, and later
its prompt and output so far are computed again. Random numbers belong to positions, so it goes on as if nothing had
happened. Order of arrival is the only priority: who waits, waits for older ones alone, and the oldest can take pages
from all others, so every request comes to its end.

An executor may launch rounds ahead of reading them. Then a sequence's end is seen one round late; what that round
gave it is thrown away and not counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from nextn.engine.admission import admit, spare_positions
from nextn.engine.batch import Batch, join
from nextn.engine.cache import Cache
from nextn.engine.device_errors import device_errors
from nextn.engine.draft_length import DraftLength, Observed
from nextn.engine.executor import EagerExecutor, Executor, HostRound, to_host
from nextn.engine.logits import SamplingState
from nextn.engine.prefill import Piece, page_table, prefill_end, prefill_rows
from nextn.engine.request import Request, Round, Running, Update
from nextn.engine.round import RoundResult, set_draft_tokens
from nextn.engine.runner import Runner
from nextn.errors import NextnError

FORWARD_ROWS = 2048
"""Rows of one prefill forward, over all prompts in it."""

News = list[tuple[Running, Update]]


@dataclass(frozen=True, slots=True)
class _Due:
    """A result under way: a round (`first` None, collected from the executor) or the first tokens of a prefill."""

    members: tuple[Running, ...]
    tokens: int
    first: RoundResult | None = None
    launched: float = 0.0
    undisturbed: bool = False


class Scheduler:
    """Decodes whatever is added, until it is idle.

    Args:
        runner: executes forwards; prefill uses it directly.
        cache: pools that nobody else uses.
        lengths: chooses K for each round; its `most` may not exceed the cache's rows - 1.
        executor: runs the rounds; None runs them eagerly.
        chunk: rows of one prompt a prefill forward.
        prompt_rows: prompt rows a step, over all prompts; None sets no limit, so that rounds wait for prompts.
        alone: run each prompt in forwards of its own, cut at multiples of `chunk`, so that its bits hang on nothing
            else; a step may then hold up to a chunk more than `prompt_rows`.
        prefilled: called with the rows of each prefill forward.
        clock: seconds; round times are measured with it.
    """

    def __init__(
        self,
        runner: Runner,
        cache: Cache,
        lengths: DraftLength,
        *,
        executor: Executor | None = None,
        chunk: int = 512,
        prompt_rows: int | None = FORWARD_ROWS,
        alone: bool = False,
        prefilled: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if lengths.most >= cache.rows:
            raise NextnError(
                f"The cache keeps {cache.rows} rows a round; {lengths.most} draft tokens need {lengths.most + 1}.",
                "Lower draft_tokens, or make the cache with more rows.",
            )
        self.runner, self.cache, self.lengths = runner, cache, lengths
        self.executor = executor if executor is not None else EagerExecutor(runner, cache)
        self.chunk, self.prompt_rows, self.alone = chunk, prompt_rows, alone
        self.prefilled, self.clock = prefilled, clock
        self.spare = spare_positions(lengths.most, self.executor.ahead)
        self.pool = len(cache.free_pages) * cache.page_size
        self.prefill_seconds = self.decode_seconds = 0.0
        self._count = 0
        self._waiting: deque[Running] = deque()
        self._prefilling: list[Running] = []
        self._ready: list[tuple[list[Running], Batch]] = []
        self._rows: list[Running] = []
        self._draft_tokens = 0
        self._due: deque[_Due] = deque()
        self._undisturbed = False
        self._collected = 0.0

    def add(self, request: Request) -> int:
        """Take a request in.

        Returns:
            its number, which `Running.index` repeats.
        Raises:
            NextnError: it can never run: bad ids, no room in the context, or larger than the whole pool.
        """
        sequence = admit(self._count, request, self.runner.target.config, pool=self.pool, spare=self.spare)
        self._waiting.append(sequence)
        self._count += 1
        return sequence.index

    def cancel(self, index: int) -> None:
        """End a request wherever it stands. Nothing more is reported of it; one that is over is left alone."""
        for s in self._alive():
            if s.index == index and s.finish is None:
                s.finish = "cancelled"
                self._end(s)
                return

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs or is under way."""
        return not self._due and next(iter(self._alive()), None) is None

    @torch.inference_mode()
    def step(self) -> News:
        """Run one round and some prompt rows.

        Returns:
            (sequence, what it gained) for every result that has been read; a sequence whose logits held NaN comes
            with nothing gained and `error` set.
        Raises:
            NextnError: the device fails, or its memory runs out.
        """
        with device_errors("decoding"):
            return self._step()

    def _step(self) -> News:
        started = self.clock()
        ready = len(self._due)
        self._arrange()
        launched = bool(self._rows)
        if launched:
            self._launch()
        news = self._read(len(self._due)) if not self.executor.ahead else []
        between = self.clock()
        self._prefill()
        ended = self.clock()
        news += self._read(ready if self.executor.ahead and launched else len(self._due))
        waited = self.clock() - ended
        self.decode_seconds += between - started + (waited if launched else 0.0)
        self.prefill_seconds += ended - between + (0.0 if launched else waited)
        return news

    def _alive(self) -> list[Running]:
        """Every sequence that is not over, those included whose last results are under way."""
        found = [*self._waiting, *self._prefilling, *(s for members, _ in self._ready for s in members), *self._rows]
        found += [s for due in self._due for s in due.members]
        return [s for s in found if s.finish is None]

    # Rounds.

    def _arrange(self) -> None:
        """Settle who takes part in the next round, with how many draft tokens, and give each the pages it needs."""
        for s in [*self._rows, *(s for members, _ in self._ready for s in members)]:
            if s.slot is not None and s.certain_to_end:
                self._release(s)
        candidates = self._candidates()
        if not candidates:
            self._rows, self._ready = [], []
            return
        k = self.lengths.choose([s.index for s in candidates])
        grown = self._make_room(candidates, max(2 * k, 1))
        staying = [s for s in self._rows if s.slot is not None]
        if self._ready or k != self._draft_tokens or len(staying) < len(self._rows):
            self._load(staying, k)
        elif grown:
            self.executor.place(self._table(self._rows))

    def _candidates(self) -> list[Running]:
        found = [*self._rows, *(s for members, _ in self._ready for s in members)]
        return sorted((s for s in found if s.slot is not None), key=lambda s: s.index)

    def _make_room(self, candidates: Sequence[Running], further: int) -> bool:
        """Extend everyone's pages by what a round needs, oldest first, pausing the youngest where none are left.

        Returns:
            whether anyone's pages grew.
        """
        grown = False
        for s in candidates:
            before = len(s.pages)
            while s.slot is not None and not self.cache.extend(s.pages, s.reach + further):
                self._pause(max([*self._prefilling, *self._candidates()], key=lambda other: other.index))
            grown = grown or len(s.pages) > before
        return grown

    def _load(self, staying: Sequence[Running], k: int) -> None:
        """Put together the batch of the next round."""
        parts: list[tuple[list[Running], Batch]] = []
        if staying:
            rows = [i for i, s in enumerate(self._rows) if s.slot is not None]
            parts.append((list(staying), self.executor.unload().keep(rows)))
        new: list[tuple[list[Running], Batch]] = []
        for members, batch in self._ready:
            rows = [i for i, s in enumerate(members) if s.slot is not None]
            if rows:
                new.append(([members[i] for i in rows], batch.keep(rows)))
        if new:
            parts.append(_joined(new))
        for members, batch in parts:
            batch.table, batch.bound = self._table(members), max(s.reach for s in members)
            set_draft_tokens(self.runner, self.cache, batch, k)
        self._rows, self._ready, self._draft_tokens = [], [], k
        if parts:
            self._rows, batch = _joined(parts)
            batch.table = self._table(self._rows)
            self.executor.load(batch)
        self._undisturbed = False

    def _table(self, sequences: Sequence[Running]) -> Tensor:
        return page_table([s.pages for s in sequences], self.cache.device)

    def _launch(self) -> None:
        bound = max(s.reach for s in self._rows)
        launched = self.clock()
        self.executor.launch(bound)
        self._expect(
            _Due(
                tuple(self._rows),
                self._draft_tokens + 1,
                launched=launched,
                undisturbed=self._undisturbed or not self.executor.ahead,
            )
        )
        self._undisturbed = True

    def _expect(self, due: _Due) -> None:
        for s in due.members:
            s.unread += 1
            s.unread_tokens += due.tokens
        self._due.append(due)

    # Prompts.

    def _admit(self) -> None:
        """Let those that wait in, in order, while their tokens and a round fit beside the next round of all others."""
        while self._waiting and self.cache.free_slots:
            s = self._waiting[0]
            if s.unread:
                return
            feed = [*s.request.prompt, *s.tokens[:-1]]
            owed = self.cache.pages_for(len(feed) + self.spare)
            for other in [*self._prefilling, *self._candidates()]:
                room = self.cache.pages_for(max(other.reach, len(other.feed)) + self.spare)
                owed += max(0, room - len(other.pages))
            if owed > len(self.cache.free_pages):
                return
            self._waiting.popleft()
            self.cache.extend(s.pages, len(feed))
            s.slot, s.feed, s.fed = self.cache.take_slot(), feed, 0
            self._prefilling.append(s)

    def _prefill(self) -> None:
        """Run prompt rows up to the step's budget, oldest first, those of equal number together."""
        self._admit()
        budget = self.prompt_rows if self.prompt_rows is not None else sum(len(s.feed) for s in self._prefilling)
        while self._prefilling and budget > 0:
            work: list[tuple[tuple[int, bool, bool], Running]] = []
            for s in self._prefilling:
                rows = min(len(s.feed) - s.fed, self.chunk, self.chunk if self.alone else budget)
                if rows and budget > 0:
                    work.append(((rows, s.fed + rows == len(s.feed), bool(s.tokens)), s))
                    budget -= rows
            for (rows, last, again), alike in groupby(sorted(work, key=lambda w: w[0]), key=lambda w: w[0]):
                members = [s for _, s in alike]
                size = 1 if self.alone else max(1, FORWARD_ROWS // rows)
                for at in range(0, len(members), size):
                    self._forward(members[at : at + size], rows, last, again)
            self._undisturbed = False

    def _forward(self, members: list[Running], rows: int, last: bool, again: bool) -> None:
        """One prefill forward; `last` rows give the first token, or start decoding `again` from the one known."""
        pieces = [Piece(s.feed, s.fed, rows, s.pages, s.slot) for s in members if s.slot is not None]
        head = self.lengths.most > 0
        for s in members:
            s.fed += rows
        if last:
            sampling = self._sampling(members)
            known = [s.tokens[-1] for s in members] if again else None
            batch, first = prefill_end(self.runner, self.cache, pieces, sampling, head=head, known=known)
            self._prefilling = [s for s in self._prefilling if s not in members]
            self._ready.append((members, batch))
            if not again:
                self._expect(_Due(tuple(members), 1, first))
        else:
            prefill_rows(self.runner, self.cache, pieces, head=head)
        if self.prefilled is not None:
            self.prefilled(rows * len(members))

    def _sampling(self, members: Sequence[Running]) -> SamplingState:
        """The sampling state of sequences as their output stands."""
        state = SamplingState.build(
            [s.params for s in members],
            [s.request.prompt for s in members],
            vocab_size=self.runner.target.config.vocab,
            stop_ids=[s.params.stop_ids(s.request.eos) for s in members],
            device=self.cache.device,
        )
        counts = [len(s.tokens) for s in members]
        if any(counts):
            width = max(counts)
            made = [[*s.tokens, *[0] * (width - len(s.tokens))] for s in members]
            state.commit(torch.tensor(made, device=self.cache.device), torch.tensor(counts, device=self.cache.device))
        return state

    # Results, and leaving.

    def _read(self, count: int) -> News:
        """Hand the oldest results to their sequences."""
        news: News = []
        for _ in range(count):
            due = self._due.popleft()
            first = due.first
            outcome = to_host(first, [s.params for s in due.members]) if first is not None else self.executor.collect()
            now = self.clock()
            needed: list[tuple[int, int]] = []
            for row, s in enumerate(due.members):
                s.unread -= 1
                s.unread_tokens -= due.tokens
                if s.finish is not None:
                    continue
                if outcome.broken[row]:
                    s.finish, s.error = (
                        "error",
                        NextnError(
                            "The model's logits hold NaN or are infinite.",
                            "Decode in another dtype (`--dtype float32`), or check the weights.",
                        ),
                    )
                    news.append((s, Update((), "")))
                else:
                    news.append((s, _give(s, outcome, row, verified=due.first is None)))
                    needed.append((s.index, outcome.accepted[row]))
                if s.finish is not None:
                    self._end(s)
            if due.first is None:
                seconds = now - max(due.launched, self._collected) if due.undisturbed else None
                self._collected = now
                self.lengths.observe(
                    Observed(due.tokens - 1, [i for i, _ in needed], [a for _, a in needed], len(due.members), seconds)
                )
        return news

    def _pause(self, s: Running) -> None:
        """Take a sequence's place; it will be computed again before any that arrived later."""
        self._release(s)
        if s in self._prefilling:
            self._prefilling.remove(s)
        s.pauses += 1
        self._waiting.appendleft(s)

    def _release(self, s: Running) -> None:
        if s.slot is not None:
            self.cache.give_back(s.pages, s.slot)
            s.slot, s.pages = None, []

    def _end(self, s: Running) -> None:
        """Forget a sequence that is over."""
        self._release(s)
        if s in self._prefilling:
            self._prefilling.remove(s)
        if s in self._waiting:
            self._waiting.remove(s)
        self.lengths.forget(s.index)


def _joined(parts: Sequence[tuple[list[Running], Batch]]) -> tuple[list[Running], Batch]:
    """Several batches as one, with their sequences in its order."""
    if len(parts) == 1:
        return parts[0]
    sampling = SamplingState.join([batch.sampling for _, batch in parts])
    return [s for members, _ in parts for s in members], join([batch for _, batch in parts], sampling)


def _give(s: Running, outcome: HostRound, row: int, *, verified: bool) -> Update:
    """A sequence's row of a result, as news; a round is counted where a verify stands behind it."""
    accepted = outcome.accepted[row]
    new = outcome.tokens[row][: accepted + 1]
    taken, text = s.take(new, outcome.logprobs[row])
    if not verified:
        return Update(taken, text)
    s.rounds.append(Round(tuple(outcome.drafts[row]), accepted, taken))
    return Update(taken, text, s.rounds[-1])
