"""What `generate` and `stream` take: options by name and type, and prompts in the forms that callers have them in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from nextn.engine.params import SamplingParams
from nextn.errors import NextnError

if TYPE_CHECKING:
    from nextn.generation import Step

Prompt = str | Sequence[int]
DraftVocabulary = int | Iterable[int] | Literal["full"] | None
MAX_CHUNK = 32768
"""Prompt positions a prefill forward at most: kernels number its widest product's elements, up to 65,535 a row, in 32
bits."""


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams`; what is absent or None comes from the checkpoint's generation_config.json."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_tokens: int | None


class DecodingOptions(SamplingOptions, total=False):
    """Options of one decoding.

    draft_tokens: K, 0 to 8, or ``auto``; 3 by default, 0 decodes without the head.
    draft_vocab: ids that can be drafted, how many of the most frequent, or ``full``; by default those that the head
        was trained to draft.
    exact: the same bits with the head on and off (`Engine`).
    chunk: prompt tokens a prefill forward; None for what suits the device.
    progress: called with (prompt positions done, in all).
    """

    draft_tokens: int | Literal["auto"] | None
    draft_vocab: DraftVocabulary
    exact: bool
    chunk: int | None
    progress: Callable[[int, int], None] | None


class GenerateOptions(DecodingOptions, total=False):
    """Options of `generate`; `on_step` is called with what each forward gave each prompt."""

    on_step: Callable[[Step], None] | None


SAMPLING = frozenset(f.name for f in fields(SamplingParams))


def check_options(options: Mapping[str, Any]) -> None:
    """Raise NextnError for a sampling option that does not exist or whose value has the wrong type."""
    unknown = sorted(set(options) - SAMPLING)
    if unknown:
        raise NextnError(f"There is no option {unknown[0]!r}.", f"Options are {', '.join(sorted(SAMPLING))}.")
    if not isinstance(options.get("logit_bias") or {}, Mapping):
        raise NextnError("logit_bias is no mapping.", "Give {token id: bias}.")


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """Prompts as a list, and whether a single one was given.

    Text, token ids (any sequence of whole numbers, arrays and tensors included), or a sequence of these.

    Raises:
        NextnError: anything else.
    """
    value = plain(prompts)
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list)):
        return [_prompt(value)], True
    if not isinstance(value, list):
        raise NextnError(
            f"A prompt is of type {type(prompts).__name__}.", "Give text, a list of token ids, or a list of these."
        )
    return [_prompt(plain(p)) for p in value], False


def plain(value: Any) -> Any:
    """Arrays and tensors as lists, other sequences too; text and all else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [plain(v) if not isinstance(v, str | bytes) else v for v in value]
    return value


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(t, Integral) and not isinstance(t, bool) for t in value):
        return [int(t) for t in value]
    raise NextnError("A prompt is neither text nor token ids.", "Give a string, or a list of whole numbers.")
