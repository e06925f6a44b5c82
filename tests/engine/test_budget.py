"""A cache sized by memory takes what it says, uses what it may, and refuses what cannot work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.engine.budget import STATE_SHARE, cache_size
from nextn.engine.cache import Cache
from nextn.errors import NextnError
from tests.engine.models import CPU, decoder


@settings(max_examples=60)
@given(
    kind=st.sampled_from(("qwen3_5", "qwen3", "qwen3_next")),
    budget=st.integers(0, 3_000_000),
    page_size=st.sampled_from((1, 16, 64)),
    rows=st.integers(1, 9),
    sequences=st.integers(1, 40),
    dtype=st.sampled_from((torch.bfloat16, torch.float32, torch.float64)),
    head=st.booleans(),
    replay=st.booleans(),
)
def test_the_largest_that_fits(
    kind: str, budget: int, page_size: int, rows: int, sequences: int, dtype: torch.dtype, head: bool, replay: bool
) -> None:
    config = decoder(kind).config
    config = config if head else replace(config, head_layers=0)
    page = (
        2 * (config.full_layers + config.head_layers) * page_size * config.kv_heads * config.head_dim * dtype.itemsize
    )
    one = Cache(config, pages=0, page_size=1, sequences=1, rows=rows, dtype=dtype, device=CPU, replay=replay)
    state = one.nbytes
    try:
        size = cache_size(
            config, budget, page_size=page_size, rows=rows, sequences=sequences, dtype=dtype, replay=replay
        )
    except NextnError:
        assert budget < page + state
        return
    cache = Cache(
        config,
        pages=size.pages,
        page_size=page_size,
        sequences=size.sequences,
        rows=rows,
        dtype=dtype,
        device=CPU,
        replay=replay,
    )
    assert cache.nbytes == size.bytes <= budget
    assert budget - size.bytes < page, "another page would fit"
    if size.sequences < sequences:
        assert (size.sequences + 1) * state > min(STATE_SHARE * budget, budget - page)
    assert size.sequences == 1 or size.sequences * state <= STATE_SHARE * budget


def test_refusal_says_what_is_missing() -> None:
    config = decoder("qwen3_5").config
    with pytest.raises(NextnError, match="holds no sequence") as refused:
        cache_size(config, 1000, page_size=64, rows=4, sequences=8, dtype=torch.float32)
    assert "more memory" in (refused.value.fix or "")
