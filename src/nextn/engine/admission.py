"""Check a request where it enters: what can never run is refused at once, with the limit that it breaks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

from nextn.engine.request import Request, Running
from nextn.errors import NextnError
from nextn.models.config import DecoderConfig


def _is_id(value: object) -> bool:
    """Whole numbers, also those of other libraries; no truth values."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def context_room(prompt: Sequence[int], config: DecoderConfig) -> int:
    """Tokens that can follow a prompt in the model's context.

    Raises:
        NextnError: an empty prompt, an id outside the vocabulary, or no room at all.
    """
    if not prompt:
        raise NextnError("The prompt is empty.", "Give at least one token.")
    odd = [t for t in prompt if not _is_id(t) or not 0 <= t < config.vocab]
    if odd:
        raise NextnError(
            f"Token id {str(odd[0])[:40]} is not in the vocabulary of {config.vocab}.",
            "Encode the prompt for this model.",
        )
    if len(prompt) >= config.max_positions:
        raise NextnError(
            f"The prompt has {len(prompt)} tokens; the model's context is {config.max_positions}.",
            "Shorten the prompt.",
        )
    return config.max_positions - len(prompt)


def token_limit(request: Request, config: DecoderConfig) -> int:
    """Tokens that a request may generate within the model's context and its own limit.

    Raises:
        NextnError: as `context_room`, or a logit bias or stop for an id outside the vocabulary.
    """
    room, wanted = context_room(request.prompt, config), request.params.max_tokens
    odd = next((t for t in request.params.stop_token_ids if t >= config.vocab), None)
    if odd is not None:
        raise NextnError(f"Stop token id {odd} is not in the vocabulary of {config.vocab}.", "Give ids of this model.")
    biased = next((t for t in request.params.logit_bias if t >= config.vocab), None)
    if biased is not None:
        raise NextnError(
            f"logit_bias names id {biased}, and the vocabulary has {config.vocab}.",
            f"Name ids from 0 to {config.vocab - 1}.",
        )
    return room if wanted is None else min(room, wanted)


def spare_positions(draft_tokens: int, ahead: int) -> int:
    """Positions past a sequence's last token that its rounds may touch.

    A round from length L touches positions up to L + 2K - 1 (the verify K + 1 rows, the draft steps K - 1 further
    ones behind the longest acceptance), and each round launched ahead starts up to K positions later than the tokens
    that are certain.
    """
    return (2 + ahead) * draft_tokens


def admit(index: int, request: Request, config: DecoderConfig, *, pool: int, spare: int) -> Running:
    """A request as a sequence that waits.

    Args:
        pool: positions that all pages hold together.
        spare: from `spare_positions`.
    Raises:
        NextnError: as `token_limit`, or the request needs more than the whole pool. One without a limit of its own
            is given what the pool holds.
    """
    limit = token_limit(request, config)
    room = pool - spare - len(request.prompt)
    if room < (1 if request.params.max_tokens is None else limit):
        raise NextnError(
            f"The request needs a cache of {len(request.prompt) + limit + spare} positions; there are {pool}.",
            f"Lower max_tokens to {room}, or give the cache more memory."
            if room > 0
            else "Shorten the prompt, or give the cache more memory.",
        )
    params = request.params
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(63))
    return Running(index, request, params, min(limit, room))
