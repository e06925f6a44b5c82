"""The engine: requests in, tokens out, round by round, on the host's side of the tensors.

`Engine.rounds` prefills the requests, decodes them together and yields what each round gave each sequence; a
sequence ends exactly where plain decoding would end it, also inside an accepted run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Literal

import torch

from nextn.engine.batch import Batch, join
from nextn.engine.cache import Cache
from nextn.engine.prefill import prefill
from nextn.engine.round import RoundResult, decode_round
from nextn.engine.runner import PlainRunner, Runner
from nextn.engine.sampling import SamplingParams, SamplingState, token_logprobs
from nextn.engine.stream import TextStream
from nextn.errors import NextnError
from nextn.kernels.support import available
from nextn.models.decoder import Decoder, Drafter

MAX_DRAFT_TOKENS = 8
PREFILL_ROWS = 2048
"""Rows of one prefill forward, over all prompts in it."""
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """A prompt and what is asked of it.

    Attributes:
        prompt: token ids, at least one.
        params: sampling, stops and limits.
        eos: the checkpoint's own end ids.
        stream: takes the generated tokens and watches for stop strings; None where there is no text.
    """

    prompt: Sequence[int]
    params: SamplingParams
    eos: frozenset[int] = frozenset()
    stream: TextStream | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a chosen token and of the most probable ones, before any processing."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Round:
    """What one verify gave one sequence.

    Attributes:
        drafts: tokens proposed and verified.
        accepted: how many of them the target agreed with.
        tokens: tokens that the sequence kept, after any cut by a stop or limit.
    """

    drafts: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """What one forward gave one sequence: its new tokens and text, and the verify behind them (None: the prefill)."""

    tokens: tuple[int, ...]
    text: str
    round: Round | None = None


@dataclass
class Running:
    """A request while it is decoded, and its result afterwards.

    Attributes:
        tokens: generated ids, the one that ended it included.
        rounds: one entry a verify that was needed.
        logprobs: one entry a token where asked for.
        finish: why it ended, None while it runs.
    """

    index: int
    request: Request
    limit: int
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None

    def take(self, new: Sequence[int], logprobs: Sequence[TokenLogprob]) -> tuple[tuple[int, ...], str]:
        """Append tokens until one ends the sequence, as decoding one at a time would.

        Returns:
            (the tokens that count, the text that they settle).
        """
        params, stream = self.request.params, self.request.stream
        stops = params.stop_ids(self.request.eos)
        taken, text = [], ""
        for at, token in enumerate(new):
            self.tokens.append(token)
            taken.append(token)
            self.logprobs.extend(logprobs[at : at + 1])
            if token in stops and len(self.tokens) > params.min_tokens:
                self.finish = "stop"
            else:
                text += stream.push(token) if stream is not None else ""
                if stream is not None and stream.stopped is not None:
                    self.finish = "stop"
                elif len(self.tokens) >= self.limit:
                    self.finish = "length"
            if self.finish is not None:
                text += stream.finish() if stream is not None else ""
                break
        return tuple(taken), text


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
        draft_tokens: K, 0 to 8; 0 decodes without the head.
        chunk: prompt positions a prefill forward.
        page_size: positions a cache page.
        fused: run rounds with the fused kernels; None where they can run and cover the model.
    """

    def __init__(
        self,
        target: Decoder,
        *,
        draft: Drafter | None = None,
        draft_tokens: int = 3,
        chunk: int = 512,
        page_size: int = 64,
        fused: bool | None = None,
    ) -> None:
        if not 0 <= draft_tokens <= MAX_DRAFT_TOKENS:
            raise NextnError(
                f"draft_tokens is {draft_tokens}.", f"Give a whole number from 0 (no head) to {MAX_DRAFT_TOKENS}."
            )
        drafter = draft if draft is not None else target
        if draft_tokens and drafter.mtp is None:
            raise NextnError("The model was loaded without an MTP head.", "Decode without one (`--no-mtp`).")
        if chunk < 1 or page_size < 1:
            raise NextnError("chunk and page_size must be at least 1.", "Give positive whole numbers.")
        self.target, self.draft, self.k = target, drafter, draft_tokens
        if fused is None:
            fused = available(target.embed.weight.device) and target.embed.weight.dtype != torch.float64
        self.fused = fused
        self.chunk, self.page_size = chunk, page_size
        self.stats = EngineStats()

    def rounds(
        self, requests: Sequence[Request], *, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[list[tuple[Running, Update]]]:
        """Decode requests together.

        Args:
            progress: called with (prompt positions done, in all) during prefill.
        Yields:
            after the prefill and after each round: (sequence, what it gained) for every sequence that took part.
        Raises:
            NextnError: an empty prompt, one that does not fit the context, or NaN in the logits.
        """
        sequences = [self._admit(i, request) for i, request in enumerate(requests)]
        if not sequences:
            return
        cache = self._cache(sequences)
        self.stats.cache_bytes = cache.nbytes
        self.runner = self._runner(cache, max(self._room(s) for s in sequences))
        running, batch, news = self._prefill(cache, sequences, progress)
        yield news
        while True:
            alive = [i for i, s in enumerate(running) if s.finish is None]
            for s in running:
                if s.finish is not None:
                    cache.give_back(s.pages, s.slot)
            if not alive:
                return
            if len(alive) < len(running):
                running, batch = [running[i] for i in alive], batch.keep(alive)
            yield self._round(cache, running, batch)

    def _runner(self, cache: Cache, longest: int) -> Runner:
        if self.fused:
            from nextn.engine.fused import FusedRunner

            if FusedRunner.supports(self.target, self.draft):
                return FusedRunner(self.target, self.draft, cache, longest=longest)
        return PlainRunner(self.target, self.draft)

    @torch.inference_mode()
    def _prefill(
        self, cache: Cache, sequences: Sequence[Running], progress: Callable[[int, int], None] | None
    ) -> tuple[list[Running], Batch, list[tuple[Running, Update]]]:
        """Prefill all, in groups of equal length. Returns the sequences in the batch's order, the batch, the news."""
        started = time.perf_counter()
        sampling = SamplingState.build(
            [s.request.params for s in sequences],
            [s.request.prompt for s in sequences],
            vocab_size=self.target.config.vocab,
            stop_ids=[s.request.params.stop_ids(s.request.eos) for s in sequences],
            device=cache.device,
        )
        total = sum(len(s.request.prompt) for s in sequences)
        batches: list[Batch] = []
        running: list[Running] = []
        news: list[tuple[Running, Update]] = []
        done = 0
        for group in self._groups(sequences):
            for s in group:
                s.pages, s.slot = cache.take(self._room(s))
            batch, first = prefill(
                self.runner,
                cache,
                [s.request.prompt for s in group],
                [s.pages for s in group],
                [s.slot for s in group],
                sampling.select([s.index for s in group]),
                k=self.k,
                chunk=self.chunk,
                progress=partial(_forward, progress, done, total) if progress is not None else None,
            )
            done += sum(len(s.request.prompt) for s in group)
            batches.append(batch)
            running += group
            for s, (_, tokens, logprobs) in zip(group, self._read(group, first), strict=True):
                news.append((s, Update(*s.take(tokens, logprobs))))
        batch = join(batches, sampling.select([s.index for s in running]))
        batch.sampling.commit(batch.bonus[:, None], torch.ones_like(batch.bonus))
        self.stats.prefill_seconds += time.perf_counter() - started
        return running, batch, news

    @torch.inference_mode()
    def _round(self, cache: Cache, running: Sequence[Running], batch: Batch) -> list[tuple[Running, Update]]:
        started = time.perf_counter()
        batch.bound = max(len(s.request.prompt) + len(s.tokens) for s in running)
        result = decode_round(self.runner, cache, batch)
        news = []
        read, drafts = self._read(running, result), result.drafts.tolist()
        for s, (accepted, tokens, logprobs), proposed in zip(running, read, drafts, strict=True):
            taken, text = s.take(tokens, logprobs)
            s.rounds.append(Round(tuple(proposed), accepted, taken))
            news.append((s, Update(taken, text, s.rounds[-1])))
        self.stats.decode_seconds += time.perf_counter() - started
        return news

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that can follow a prompt in the model's context.

        Raises:
            NextnError: an empty prompt, an id outside the vocabulary, or no room at all.
        """
        config = self.target.config
        if not prompt:
            raise NextnError("The prompt is empty.", "Give at least one token.")
        odd = next((t for t in prompt if not 0 <= t < config.vocab), None)
        if odd is not None:
            raise NextnError(
                f"Token id {odd} is not in the vocabulary of {config.vocab}.", "Encode the prompt for this model."
            )
        if len(prompt) >= config.max_positions:
            raise NextnError(
                f"The prompt has {len(prompt)} tokens; the model's context is {config.max_positions}.",
                "Shorten the prompt.",
            )
        return config.max_positions - len(prompt)

    def _admit(self, index: int, request: Request) -> Running:
        room, wanted = self.room(request.prompt), request.params.max_tokens
        return Running(index, request, room if wanted is None else min(room, wanted))

    def _groups(self, sequences: Sequence[Running]) -> Iterator[list[Running]]:
        """Sequences that can be prefilled together: equal lengths of prompt and room, within PREFILL_ROWS."""

        def shape(s: Running) -> tuple[int, int]:
            return len(s.request.prompt), self._room(s)

        for (length, _), alike in groupby(sorted(sequences, key=shape), key=shape):
            members = list(alike)
            size = max(1, PREFILL_ROWS // min(length, self.chunk))
            for at in range(0, len(members), size):
                yield members[at : at + size]

    def _room(self, sequence: Running) -> int:
        """Positions that a sequence may touch: its tokens and those of rounds not yet cut."""
        return len(sequence.request.prompt) + sequence.limit + 2 * (self.k + 1)

    def _cache(self, sequences: Sequence[Running]) -> Cache:
        weight = self.target.embed.weight
        return Cache(
            replace(self.target.config, head_layers=self.draft.config.head_layers if self.k else 0),
            pages=sum(-(-self._room(s) // self.page_size) for s in sequences),
            page_size=self.page_size,
            sequences=len(sequences),
            rows=self.k + 1,
            dtype=weight.dtype,
            device=weight.device,
        )

    def _read(self, running: Sequence[Running], result: RoundResult) -> list[tuple[int, list[int], list[TokenLogprob]]]:
        """Bring a result to the host: (accepted, new tokens, their log probabilities) a sequence."""
        if bool(result.broken.any()):
            raise NextnError(
                "The model's logits hold NaN.", "Decode in another dtype (`--dtype float32`), or check the weights."
            )
        accepted = result.accepted.tolist()
        tokens = result.tokens.tolist()
        out: list[tuple[int, list[int], list[TokenLogprob]]] = []
        for i, s in enumerate(running):
            new = tokens[i][: accepted[i] + 1]
            logprobs: list[TokenLogprob] = []
            if s.request.params.logprobs is not None:
                chosen, ids, logs = token_logprobs(
                    result.logits[i, : len(new)], result.tokens[i, : len(new)], s.request.params.logprobs
                )
                for token, log, best, best_logs in zip(new, chosen.tolist(), ids.tolist(), logs.tolist(), strict=True):
                    logprobs.append(TokenLogprob(token, log, tuple(zip(best, best_logs, strict=True))))
            out.append((accepted[i], new, logprobs))
        return out


def _forward(progress: Callable[[int, int], None], base: int, total: int, done: int) -> None:
    """One group's progress as that of all prompts."""
    progress(base + done, total)
