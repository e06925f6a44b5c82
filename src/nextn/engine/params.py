"""What a request may ask of decoding: sampling, penalties, stops and limits, checked once where they enter.

Names, ranges and defaults are those of the OpenAI API and vLLM's SamplingParams.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from nextn.errors import NextnError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy decoding, as in vLLM."""


@dataclass(frozen=True)
class SamplingParams:
    """One request's decoding options.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding.
        top_p: keep the smallest set of most probable tokens whose probabilities add up to this; 1 is off.
        top_k: keep tokens at least as probable as the k-th; 0 or -1 is off.
        min_p: keep tokens at least this share as probable as the most probable one; 0 is off.
        seed: makes the request repeatable for one draft length, as far as its logits are: those of another batch can
            differ by rounding, and sampled text with them, except in exact decoding. None draws one. Where the
            length follows the clock (`auto`), sampled text does too.
        repetition_penalty: divides positive and multiplies negative logits of ids in prompt or output; 1 is off.
        presence_penalty: subtracted from the logits of ids in the output.
        frequency_penalty: subtracted once for each time that the id is in the output.
        logit_bias: id -> added to its logit after the penalties.
        logprobs: how many of the most probable tokens to report at each position; None reports nothing.
        max_tokens: generated tokens at most; None generates until the context is full.
        stop: strings that end the text; they are not part of it. One string counts as a list of one.
        stop_token_ids: ids that end the text beside the checkpoint's own.
        ignore_eos: do not stop at the checkpoint's own end ids.
        min_tokens: generated tokens before which neither ids nor strings stop.

    Raises:
        NextnError: a value out of its range, naming it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    max_tokens: int | None = 16
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0)
        _number("top_p", self.top_p, 0, 1, above=True)
        _whole("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, above=True)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise NextnError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}.",
                "Give a min_tokens of at most max_tokens.",
            )
        for name in ("stop", "stop_token_ids"):
            if not isinstance(value := getattr(self, name), Iterable):
                raise NextnError(f"{name} is {value!r}.", "Give a list.")
        if not isinstance(self.ignore_eos, bool):
            raise NextnError(f"ignore_eos is {self.ignore_eos!r}.", "Give True or False.")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(s, str) and s for s in stop):
            raise NextnError("A stop string is empty or not text.", "Give stop strings of one character or more.")
        for token in self.stop_token_ids:
            _whole("a stop token id", token, 0)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def stop_ids(self, eos: Iterable[int]) -> frozenset[int]:
        """All ids that end this request, given the checkpoint's own end ids."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos))


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # JSON has only string keys.
        token: Any = int(key) if isinstance(key, str) and key.isdecimal() else key
        _whole("an id in logit_bias", token, 0)
        _number(f"logit_bias of id {token}", value, -100, 100)
        checked[int(token)] = float(value)
    return checked


def _number(name: str, value: Any, low: float, high: float | None = None, *, above: bool = False) -> None:
    """Refuse what is not a finite number from `low` to `high`; `above` leaves out `low` itself."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < low or (above and value == low) or (high is not None and value > high):
        limits = f"over {low}" if above else f"of {low} or more"
        raise NextnError(
            f"{name} is {value}.", f"Give a number {limits}{f', up to {high}' if high is not None else ''}."
        )


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse what is not a whole number from `low` to `high`."""
    number = isinstance(value, Integral) and not isinstance(value, bool)
    if not number or value < low or (high is not None and value > high):
        limits = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise NextnError(f"{name} is {value}.", f"Give a whole number {limits}.")
