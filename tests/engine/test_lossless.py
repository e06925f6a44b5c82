"""Greedy tokens with the head equal those without it, whatever the head says; drafts are the head's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.engine.engine import Engine
from nextn.models.context import SequenceContext
from nextn.models.decoder import Decoder
from tests.engine.models import KINDS, Prompter, decode, decoder, plain_drafts


def plain(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by whole-sequence forwards."""
    ids = list(prompt)
    for _ in range(count):
        hidden, _ = model(torch.tensor([ids]), SequenceContext(torch.arange(len(ids))[None]))
        ids.append(int(model.logits(hidden[0, -1]).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_without_head_equals_whole_sequence_forwards(kind: str) -> None:
    model = decoder(kind)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    [s] = decode(Engine(model, draft_tokens=0, chunk=3, page_size=4), [prompt], max_tokens=16)
    assert s.tokens == plain(model, prompt, 16)


prompts = st.lists(st.lists(st.integers(0, 96), min_size=1, max_size=20), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    prompts=prompts,
    k=st.integers(1, 8),
    chunk=st.integers(1, 9),
    page=st.sampled_from((1, 3, 16)),
    tokens=st.integers(1, 20),
)
def test_head_changes_no_token(kind: str, prompts: list[list[int]], k: int, chunk: int, page: int, tokens: int) -> None:
    model = decoder(kind)
    off = decode(Engine(model, draft_tokens=0, chunk=64), prompts, max_tokens=tokens)
    on = decode(Engine(model, draft_tokens=k, chunk=chunk, page_size=page), prompts, max_tokens=tokens)
    assert [s.tokens for s in on] == [s.tokens for s in off]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(("qwen3_next", "qwen3_5", "qwen3")),
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=12),
    k=st.integers(1, 8),
    lies=st.frozensets(st.integers(0, 60), max_size=30),
)
def test_any_pattern_of_acceptance_changes_no_token(kind: str, prompt: list[int], k: int, lies: frozenset[int]) -> None:
    """Every mixture of accepted and rejected drafts, hence every choice among the snapshots."""
    model = decoder(kind)
    count = 30
    [off] = decode(Engine(model, draft_tokens=0), [prompt], max_tokens=count)
    text = prompt + off.tokens
    drafter = Prompter(model, text, lies)
    [on] = decode(Engine(model, draft=drafter, draft_tokens=k), [prompt], max_tokens=count)
    assert on.tokens == off.tokens
    position = len(prompt) + 1
    for r in on.rounds:
        expected = next((i for i in range(k) if position + i in lies or position + i >= len(text)), k)
        shown = min(expected, len(text) - position)
        assert min(r.accepted, len(text) - position) == shown
        position += r.accepted + 1


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_drafts_are_the_heads_own(kind: str) -> None:
    """Each round's drafts equal those of whole-sequence forwards: extend, recycling and draft cache are right."""
    model = decoder(kind)
    for prompt in ([7], [3, 1, 4, 1, 5, 9, 2, 6, 5]):
        [s] = decode(Engine(model, draft_tokens=4, chunk=4, page_size=4), [prompt], max_tokens=10)
        ids = [*prompt, s.tokens[0]]
        for r in s.rounds:
            assert list(r.drafts) == plain_drafts(model, ids, 4)
            ids += r.tokens


def test_batch_does_not_change_a_sequence() -> None:
    model = decoder("qwen3_5")
    prompts = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 9], [30] * 17]
    together = decode(Engine(model, draft_tokens=3), prompts, max_tokens=15)
    alone = [decode(Engine(model, draft_tokens=3), [p], max_tokens=15)[0] for p in prompts]
    assert [s.tokens for s in together] == [s.tokens for s in alone]
    assert [s.rounds for s in together] == [s.rounds for s in alone]


def test_float32_differs_at_near_ties_only() -> None:
    """In float32 a token may differ only where the two best logits are closer than rounding; here none do."""
    model, exact = decoder("qwen3_5", torch.float32), decoder("qwen3_5")
    prompts = [[i, i + 1, i + 2] for i in range(24)]
    off = decode(Engine(model, draft_tokens=0), prompts, max_tokens=24)
    on = decode(Engine(model, draft_tokens=3), prompts, max_tokens=24)
    differing = 0
    for prompt, a, b in zip(prompts, off, on, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), None)
        if first is None:
            continue
        differing += 1
        ids = torch.tensor([prompt + a.tokens[:first]])
        hidden, _ = exact(ids, SequenceContext(torch.arange(ids.shape[1])[None]))
        best = exact.logits(hidden[0, -1]).topk(2).values
        assert float(best[0] - best[1]) < 1e-4
    assert differing <= 2
