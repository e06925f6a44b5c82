"""Sampled tokens follow the target's own distribution, head on or off: chi-square over pairs of tokens, many seeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats

from nextn.engine.engine import Engine
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request
from nextn.engine.sampling import SamplingState, process
from nextn.models.context import SequenceContext
from nextn.models.decoder import Decoder
from tests.engine.models import decoder

VOCAB, SEEDS = 11, 3000
SIGNIFICANCE = 1e-3
"""Of each test, fixed before the first run; seeds are fixed too, so that a pass is a fact and not a chance."""
PROMPT = [2, 7, 1]
CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.2, "min_p": 0.15},
    {"temperature": 1.0, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.4, "presence_penalty": 0.3},
]


def law(model: Decoder, ids: list[int], options: dict[str, Any], output: int) -> torch.Tensor:
    """The distribution after `ids`, of which the last `output` were generated."""
    with torch.no_grad():
        hidden, _ = model(torch.tensor([ids]), SequenceContext(torch.arange(len(ids))[None]))
        params = SamplingParams(**options, max_tokens=4)
        state = SamplingState.build([params], [ids[: len(ids) - output]], vocab_size=VOCAB)
        made = torch.tensor([ids[len(ids) - output :]], dtype=torch.int64).view(1, -1)
        state.commit(made, torch.tensor([output]))
        return process(model.logits(hidden[:, -1:]), state)[0, 0]


def exact(model: Decoder, options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Probability of every triple of first tokens."""
    out: dict[tuple[int, ...], float] = {}
    first = law(model, PROMPT, options, 0)
    for a in first.nonzero()[:, 0].tolist():
        second = law(model, [*PROMPT, a], options, 1)
        for b in second.nonzero()[:, 0].tolist():
            third = law(model, [*PROMPT, a, b], options, 2)
            for c in third.nonzero()[:, 0].tolist():
                out[a, b, c] = float(first[a] * second[b] * third[c])
    return out


def p_value(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float], total: int) -> float:
    """Chi-square against the expected law, rare cells pooled."""
    assert set(counts) <= set(expected), "a token of probability zero was drawn"
    observed, wanted, rare = [], [], [0, 0.0]
    for cell, probability in expected.items():
        if probability * total < 8:
            rare[0] += counts.get(cell, 0)
            rare[1] += probability * total
        else:
            observed.append(counts.get(cell, 0))
            wanted.append(probability * total)
    if rare[1] > 0:
        observed.append(int(rare[0]))
        wanted.append(rare[1])
    scale = sum(observed) / sum(wanted)
    return float(stats.chisquare(observed, [w * scale for w in wanted]).pvalue)


def draw(
    model: Decoder, k: int, options: dict[str, Any], draft_vocab: list[int] | None = None
) -> tuple[dict[tuple[int, ...], int], float]:
    """Counts of the first three tokens over many seeds, and the accept length."""
    counts: dict[tuple[int, ...], int] = {}
    accepted = rounds = 0
    for start in range(0, SEEDS, 500):
        seeds = range(start, start + 500)
        requests = [Request(PROMPT, SamplingParams(**options, seed=s, max_tokens=3)) for s in seeds]
        sequences = {}
        for news in Engine(model, draft_tokens=k, draft_vocab=draft_vocab).rounds(requests):
            sequences |= {s.index: s for s, _ in news}
        for s in sequences.values():
            counts[tuple(s.tokens)] = counts.get(tuple(s.tokens), 0) + 1
            accepted += sum(r.accepted for r in s.rounds)
            rounds += len(s.rounds)
    return counts, 1 + accepted / rounds


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(o))
def test_engine_draws_from_the_target(options: dict[str, Any], k: int) -> None:
    model = decoder("qwen3_5", torch.float32, VOCAB)
    counts, accept_length = draw(model, k, options)
    assert sum(counts.values()) == SEEDS
    assert p_value(counts, exact(model, options), SEEDS) > SIGNIFICANCE
    if k:
        assert accept_length > 1.05


def test_the_test_can_fail() -> None:
    """Draws at another temperature are told apart."""
    model = decoder("qwen3_5", torch.float32, VOCAB)
    counts, _ = draw(model, 2, {"temperature": 0.8})
    assert p_value(counts, exact(model, {"temperature": 1.0}), SEEDS) < SIGNIFICANCE


def test_a_seed_repeats_whatever_shares_the_batch() -> None:
    model = decoder("qwen3_5")
    mine = Request(PROMPT, SamplingParams(temperature=1.0, seed=5, max_tokens=12))
    others = [Request([i], SamplingParams(temperature=0.9, seed=i, max_tokens=5 + i)) for i in range(3)]

    def tokens(requests: list[Request]) -> list[int]:
        return next(s.tokens for s in _run(Engine(model), requests) if s.request is mine)

    assert tokens([mine]) == tokens([*others, mine]) == tokens([mine, *others])


def _run(engine: Engine, requests: list[Request]) -> list[Any]:
    sequences = {}
    for news in engine.rounds(requests):
        sequences |= {s.index: s for s, _ in news}
    return list(sequences.values())
