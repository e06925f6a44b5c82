"""A sequence does not notice where its pages and slot lie: freed, reused or moved in the middle, its tokens stay."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.engine.cache import Cache
from nextn.engine.draft_length import FixedLength
from nextn.engine.prefill import prefill
from nextn.engine.request import Request
from nextn.engine.round import decode_round
from nextn.engine.runner import PlainRunner
from nextn.engine.sampling import SamplingParams, SamplingState
from nextn.engine.scheduler import Scheduler
from tests.engine.traces import tiny

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def pools(cache: Cache) -> list[torch.Tensor]:
    return [cache.k, cache.v, cache.draft_k, cache.draft_v]


def rounds(seed: int | None, k: int, temperature: float) -> list[tuple[list[int], list[int]]]:
    """(tokens kept, drafts) a sequence and round; with a seed, everything moves to other pages between rounds."""
    model = tiny()
    cache = Cache(model.config, pages=40, page_size=3, sequences=6, rows=k + 1, dtype=torch.float64, device=CPU)
    runner, rng = PlainRunner(model, model), random.Random(seed)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=60) for i in range(2)]
    out: list[tuple[list[int], list[int]]] = []
    with torch.inference_mode():
        for i, prompt in enumerate(PROMPTS):
            sampling = SamplingState.build([params[i]], [prompt], vocab_size=model.config.vocab)
            pages, slot = cache.take(54)
            batch, _ = prefill(runner, cache, [prompt], [pages], [slot], sampling, k=k, chunk=2)
            for _ in range(5):
                if seed is not None:
                    pages, slot = moved(cache, rng, pages, slot)
                    batch.table, batch.slots = torch.tensor([pages]), torch.tensor([slot])
                r = decode_round(runner, cache, batch)
                out.append((r.tokens[0, : int(r.accepted[0]) + 1].tolist(), r.drafts[0].tolist()))
            cache.give_back(pages, slot)
    return out


def moved(cache: Cache, rng: random.Random, pages: list[int], slot: int) -> tuple[list[int], int]:
    """The same contents in other pages and another slot; what was left behind is spoilt."""
    rng.shuffle(cache.free_pages)
    rng.shuffle(cache.free_slots)
    new, new_slot = cache.take(len(pages) * cache.page_size)
    for pool in pools(cache):
        pool[:, new] = pool[:, pages]
        pool[:, pages] = 50.0
    for pool in (cache.states, cache.conv):
        pool[:, new_slot] = pool[:, slot]
        pool[:, slot] = 50.0
    cache.give_back(pages, slot)
    return new, new_slot


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_moved_between_rounds(k: int, temperature: float) -> None:
    assert rounds(7, k, temperature) == rounds(None, k, temperature)


@settings(max_examples=30)
@given(
    first=st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=9), min_size=1, max_size=4),
    between=st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=9), max_size=3),
    k=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_decoded_again_in_used_pages(first: list[list[int]], between: list[list[int]], k: int, seed: int) -> None:
    """The same requests three times through one cache, others in between, pages handed out in another order."""
    model = tiny()
    cache = Cache(model.config, pages=60, page_size=2, sequences=4, rows=k + 1, dtype=torch.float64, device=CPU)
    rng = random.Random(seed)
    scheduler = Scheduler(PlainRunner(model, model), cache, FixedLength(k))
    answers = []
    for prompts in (first, between, first, between, first):
        numbers = [
            scheduler.add(Request(p, SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=8)))
            for i, p in enumerate(prompts)
        ]
        found = {}
        while not scheduler.idle:
            found |= {s.index: (s.tokens, s.rounds) for s, _ in scheduler.step()}
        answers.append([found[n] for n in numbers])
        rng.shuffle(cache.free_pages)
        rng.shuffle(cache.free_slots)
    assert answers[0] == answers[2] == answers[4]
    assert answers[1] == answers[3]
