"""A cache sized by memory takes what it says, uses what it may, and refuses what cannot work."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.engine import budget as budget_module
from nextn.engine import engine as engine_module
from nextn.engine.budget import STATE_SHARE, cache_size, free_bytes
from nextn.engine.cache import Cache
from nextn.engine.engine import Engine
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request
from nextn.errors import NextnError
from tests.engine.models import CPU, decode, decoder


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


def test_the_least_is_left_room_beside_states() -> None:
    """Half of the memory would go to states; the pages that one long sequence needs come first."""
    config = decoder("qwen3_5").config
    asked = {"page_size": 16, "rows": 4, "dtype": torch.float32}
    page, state = (
        Cache(config, pages=p, page_size=16, sequences=s, rows=4, dtype=torch.float32, device=CPU).nbytes
        for p, s in ((1, 0), (0, 1))
    )
    budget = 30 * page + 6 * state
    size = cache_size(config, budget, sequences=64, least_pages=30, least_sequences=2, **asked)  # type: ignore[arg-type]
    assert size.pages >= 30
    assert 2 <= size.sequences <= 6
    assert size.bytes <= budget
    with pytest.raises(NextnError, match="480 positions"):
        cache_size(config, budget, sequences=64, least_pages=30, least_sequences=7, **asked)  # type: ignore[arg-type]


def test_a_list_that_memory_does_not_hold_at_once_takes_turns() -> None:
    model = decoder("qwen3_5")
    prompts = [[3 + i, 5, 7, *range(i)] for i in range(9)]
    expected = [s.tokens for p in prompts for s in decode(Engine(model, page_size=8), [p], max_tokens=20)]
    one = Engine(model, page_size=8)
    decode(one, [prompts[-1]], max_tokens=20)
    for share in (1.0, 2.5, 4.0):
        engine = Engine(model, page_size=8, cache_bytes=int(one.stats.cache_bytes * share))
        found = decode(engine, prompts, max_tokens=20)
        assert engine.stats.cache_bytes <= one.stats.cache_bytes * share
        assert [s.tokens for s in found] == expected
    with pytest.raises(NextnError, match=r"A sequence of \d+ positions takes \d+\.\d\d MB; \d+\.\d\d MB are free"):
        decode(Engine(model, page_size=8, cache_bytes=one.stats.cache_bytes - 1), prompts, max_tokens=20)


def test_long_lists_take_turns_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "AT_ONCE", 3)
    model = decoder("qwen3")
    prompts = [[3 + i, 5, 7] for i in range(8)]
    engine = Engine(model)
    found = decode(engine, prompts, max_tokens=9)
    alone = Engine(model)
    assert [s.tokens for s in found] == [decode(alone, [p], max_tokens=9)[0].tokens for p in prompts]
    assert engine.stats.cache_bytes == 3 * alone.stats.cache_bytes


def test_arriving_prompts_do_not_stop_those_that_decode() -> None:
    engine = Engine(decoder("qwen3"), chunk=8)
    scheduler = engine.scheduler([100, 100])
    params = SamplingParams(temperature=0.0, max_tokens=60)
    scheduler.add(Request([1, 2, 3], params))
    scheduler.step()
    scheduler.step()
    scheduler.add(Request(list(range(1, 41)), SamplingParams(temperature=0.0, max_tokens=2)))
    steps: list[list[int]] = []
    while not steps or 1 not in steps[-1]:
        steps.append(sorted({s.index for s, _ in scheduler.step()}))
    assert steps == [[0]] * 4 + [[0, 1]]


def test_no_pool_for_nobody() -> None:
    with pytest.raises(NextnError, match="no sequence"):
        Engine(decoder("qwen3")).scheduler([])
    with pytest.raises(NextnError, match="of 1000000000000000 positions is asked for"):
        Engine(decoder("qwen3")).scheduler([10**15])


def test_what_is_free_respects_the_process_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = free_bytes(CPU)
    assert 0 < whole <= budget_module.CPU_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (held + 10**8, resource.RLIM_INFINITY))
    assert free_bytes(CPU) <= budget_module.CPU_SHARE * 10**8 + 10**7
    monkeypatch.setattr(budget_module, "Path", lambda name: Path("/no/such") / str(name).lstrip("/"))
    assert free_bytes(CPU) > 0
