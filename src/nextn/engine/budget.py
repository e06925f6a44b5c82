"""Size a cache by memory: how many sequences and pages fit into a number of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nextn.engine.cache import Cache
from nextn.errors import NextnError
from nextn.models.config import DecoderConfig

STATE_SHARE = 0.5
"""Of the memory, at most, for recurrent states; the rest is for keys and values."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What fits.

    Attributes:
        pages, sequences: for `Cache`.
        bytes: that such a cache takes.
    """

    pages: int
    sequences: int
    bytes: int


def cache_size(
    config: DecoderConfig,
    budget_bytes: int,
    *,
    page_size: int,
    rows: int,
    sequences: int,
    dtype: torch.dtype,
    replay: bool = False,
) -> CacheSize:
    """The largest cache within a budget.

    Args:
        config: the decoder, `head_layers` 0 where the head is off.
        budget_bytes: memory for the cache.
        sequences: wanted at once; fewer where their states would take more than STATE_SHARE.
        page_size, rows, dtype, replay: as for `Cache`.
    Raises:
        NextnError: not even one sequence and one page fit.
    """

    def size(pages: int, held: int) -> int:
        return Cache(
            config,
            pages=pages,
            page_size=page_size,
            sequences=held,
            rows=rows,
            dtype=dtype,
            device=torch.device("meta"),
            replay=replay,
        ).nbytes

    page, state = size(1, 0), size(0, 1)
    if budget_bytes < page + state:
        raise NextnError(
            f"A cache of {budget_bytes / 1e6:.1f} MB holds no sequence: its states take {state / 1e6:.1f} MB, a page "
            f"of {page_size} positions {page / 1e6:.2f} MB.",
            "Give the cache more memory, or lower draft_tokens.",
        )
    held = sequences
    if state:
        held = min(sequences, max(1, min(int(budget_bytes * STATE_SHARE), budget_bytes - page) // state))
    pages = (budget_bytes - held * state) // page
    return CacheSize(pages, held, size(pages, held))
