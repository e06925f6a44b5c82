"""A request, and what becomes of it: tokens taken one by one until a stop or a limit ends it, and how each came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nextn.engine.params import SamplingParams
from nextn.engine.stream import TextStream
from nextn.errors import NextnError

FinishReason = Literal["stop", "length", "cancelled", "error"]


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


@dataclass(eq=False)
class Running:
    """A request while it is decoded, and its result afterwards.

    Attributes:
        index: its number, in order of arrival.
        params: the request's, with a seed drawn where it names none, so that a pause does not draw another.
        limit: generated tokens at most.
        tokens: generated ids, the one that ended it included.
        rounds: one entry a verify that was needed.
        logprobs: one entry a token where asked for.
        finish: why it ended, None while it runs.
        error: what went wrong where `finish` is ``error``.
        slot, pages: its place in the cache; slot None while it waits and when it is over.
        feed: tokens that prefill has to put into the cache: the prompt, and the output before the last token
            where a paused sequence is computed again.
        fed: how many of them are there.
        unread, unread_tokens: results under way, and the tokens that they bring at most.
        pauses: how often its place was taken from it.
    """

    index: int
    request: Request
    params: SamplingParams
    limit: int
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: NextnError | None = None
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    feed: list[int] = field(default_factory=list)
    fed: int = 0
    unread: int = 0
    unread_tokens: int = 0
    pauses: int = 0

    @property
    def reach(self) -> int:
        """Committed positions at most, once all that is under way has arrived."""
        return len(self.request.prompt) + len(self.tokens) + self.unread_tokens - 1

    @property
    def certain_to_end(self) -> bool:
        """Whether results under way, one token each at least, bring it to its limit."""
        return len(self.tokens) + self.unread >= self.limit

    def take(self, new: Sequence[int], logprobs: Sequence[TokenLogprob]) -> tuple[tuple[int, ...], str]:
        """Append tokens until one ends the sequence, as decoding one at a time would.

        Returns:
            (the tokens that count, the text that they settle).
        """
        params, stream = self.params, self.request.stream
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
