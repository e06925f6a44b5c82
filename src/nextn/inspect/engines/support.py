"""What is known of an engine: which heads it runs, and how it builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Support:
    """How one engine runs the heads of some architectures or model types.

    Attributes:
        kinds: architectures or model types of config.json; ``gguf:ARCH`` for a GGUF.
        heads: how many head layers are run; None for all.
        drafts: the one number of draft tokens that works; None for any.
        since: first version with this support, "" for any that has native heads.
        missing: what missing head tensors cause: ``silent`` random weights; an ``error``; ``unquantised``: an error
            where the checkpoint is not quantised, else silence; ``layer``: the same, but always an error where a whole
            layer is missing.
        unknown: what keys under the head's names that the engine does not expect cause: they are skipped (``skip``), a
            KeyError (``key``), or vLLM's AutoWeightsLoader refuses them by name (``named``).
        spared: endings of keys that are skipped though `unknown` says otherwise.
        count: what the declared layer count must be for a head to run: ``ignored``, ``positive`` (0 or absent fails),
            ``nonzero`` (0 fails, absent is taken as 1), or ``one`` (all else fails an assertion).
        grouped: whether stacked experts are read.
        prefixes: what may stand before the head's published keys.
        stops_at: prefixes at which the loader stops with a KeyError; keys under others are passed over.
        full: quantisation methods for which the whole head is built in full precision.
        plain: words in checkpoint module names that are never built quantised.
        rename: (from, to): how the head's module names change before lists are matched; "" keeps them. ``{n}`` is the
            number of the target's layers.
        strict: whether `rename` was read from source, so that lists can be matched as the engine does.
        hybrid: recurrent layers in the target.
    """

    kinds: tuple[str, ...]
    heads: int | None = None
    drafts: int | None = None
    since: str = ""
    missing: Literal["silent", "error", "unquantised", "layer"] | None = None
    unknown: Literal["skip", "key", "named"] | None = None
    spared: tuple[str, ...] = ()
    count: Literal["ignored", "positive", "nonzero", "one"] | None = None
    grouped: bool | None = None
    prefixes: tuple[str, ...] | None = None
    stops_at: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    rename: tuple[str, str] = ("", "")
    strict: bool = False
    hybrid: bool = False
