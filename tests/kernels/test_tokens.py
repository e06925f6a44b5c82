"""Tokens from logits on the device against the definitions in the engine's sampling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextn.engine import random, sampling
from nextn.engine.logits import SamplingState, process
from nextn.engine.params import SamplingParams
from tests.kernels.cases import DEVICE, DTYPES, error, randn, real

pytest.importorskip("triton")
from nextn.kernels import probs_triton, random_triton, settle_triton, tokens_triton

WIDTHS = [(3, 50), (2, 5000), real(4, 248320)]


def uniform(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width", WIDTHS)
def test_argmax_takes_the_lowest_of_equals(rows: int, width: int, dtype: torch.dtype) -> None:
    logits = randn(rows, width, dtype=dtype)
    logits[0, [7, width - 3]] = 30.0
    tokens, valid = tokens_triton.argmax(logits)
    assert torch.equal(tokens, logits.float().argmax(-1))
    assert tokens[0] == 7
    assert valid.all()


@pytest.mark.parametrize("width", [50, 5000])
def test_a_nan_invalidates_its_row_alone(width: int) -> None:
    logits = randn(3, width)
    logits[1, [width - 9, width - 2]] = float("nan")
    logits[1, 4] = float("inf")
    tokens, valid = tokens_triton.argmax(logits)
    assert valid.tolist() == [True, False, True]
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("width", [50, 5000])
def test_greedy_acceptance(width: int) -> None:
    choices = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9], [1, 0, 1, 0]], device=DEVICE)
    drafts = torch.tensor([[1, 2, 3, 0], [5, 0, 7, 0], [0, 9, 9, 0], [1, 0, 0, 0]], device=DEVICE)[:, :3]
    logits = randn(4, 4, width).scatter(2, choices[..., None], 9.0)
    logits[1, 3, 8] = float("nan")
    tokens, accepted, broken = tokens_triton.accept_best(logits, drafts)
    expected = sampling.accept_greedy(logits.argmax(-1), drafts)
    assert torch.equal(tokens, choices)
    assert torch.equal(tokens, expected[0])
    assert accepted.tolist() == expected[1].tolist() == [3, 1, 0, 2]
    assert broken.tolist() == [False, True, False, False]


@pytest.mark.parametrize("width", [50, 5000])
def test_a_row_without_a_finite_best_breaks_its_sequence(width: int) -> None:
    logits = randn(4, 2, width)
    logits[1, 1, 7] = float("inf")
    logits[2, 0] = float("-inf")
    logits[3, 0, : width - 1] = float("-inf")
    drafts = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
    *_, broken = tokens_triton.accept_best(logits, drafts)
    assert broken.tolist() == sampling.broken_logits(logits).tolist() == [False, True, True, False]


def test_greedy_acceptance_of_nothing() -> None:
    logits = randn(3, 1, 70)
    tokens, accepted, broken = tokens_triton.accept_best(logits, torch.empty(3, 0, dtype=torch.int64, device=DEVICE))
    assert torch.equal(tokens, logits.argmax(-1))
    assert accepted.tolist() == [0, 0, 0]
    assert not broken.any()


@pytest.mark.parametrize("batch,steps", [(1, 3), (3, 0), (5, 1), (2, 8)])
def test_what_follows_from_acceptance(batch: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    tokens, wide, lengths = (
        torch.randint(0, 1000, shape, generator=generator).to(DEVICE)
        for shape in ((batch, steps + 1), (batch, steps + 2), (batch,))
    )
    drafts, accepted = wide[:, 1 : steps + 1], lengths % (steps + 1)
    broken = lengths % 3 == 0
    got = settle_triton.settle(lengths, tokens, accepted, drafts, broken)
    expected = sampling.settle(lengths, tokens, accepted, drafts, broken)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    for b in range(batch):
        kept = int(accepted[b]) + 1
        assert [int(t[b]) for t in expected[:3]] == [kept, int(lengths[b]) + kept, int(tokens[b, kept - 1])]
        outcome = [*tokens[b].tolist(), kept - 1, *drafts[b].tolist(), int(broken[b])]
        assert expected.outcome[b].tolist() == outcome


@settings(deadline=None, max_examples=30)
@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    start=st.integers(0, 2**40),
    rows=st.integers(0, 9),
)
def test_random_numbers_are_the_definitions(seeds: list[int], start: int, rows: int) -> None:
    """To the last bit, whatever the signs and however products wrap; with no row axis at rows 0."""
    seed = torch.tensor(seeds, device=DEVICE)
    position = start + torch.arange(len(seeds) * max(rows, 1), device=DEVICE)
    position = position.view(len(seeds), rows) if rows else position
    got = random_triton.uniforms(seed, position, sampling.LANES)
    assert torch.equal(got, random.uniforms(seed, position))


@pytest.mark.parametrize("rows,width", WIDTHS)
def test_sampling_draws_what_the_definition_draws(rows: int, width: int) -> None:
    probs = torch.softmax(3 * randn(rows, width), -1)
    probs[:, ::2] = 0
    for seed in range(4):
        draws = uniform(rows, 3, seed=seed)[:, 1]
        tokens = tokens_triton.sample(probs, draws)
        assert torch.equal(tokens, sampling.sample(probs, draws))
    for edge in (0.0, 1 - 2.0**-53):
        tokens = tokens_triton.sample(probs, torch.full((rows,), edge, dtype=torch.float64, device=DEVICE))
        assert (tokens % 2 == 1).all()
        assert tokens.tolist() == [1 if edge == 0 else width - 1 - width % 2] * rows


CHOICES = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=30, top_p=0.95, min_p=0.02),
    SamplingParams(top_p=0.01),
    SamplingParams(top_k=1),
]


def processed(logits: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """(kernel's, definition's) probabilities."""
    state = SamplingState.build(params, [[0]] * len(params), vocab_size=logits.shape[-1], device=DEVICE)
    got = probs_triton.process(
        logits,
        state.temperature.view(-1),
        state.top_k.view(-1) if state.plan.top_k else None,
        state.top_p.view(-1) if state.plan.top_p else None,
        state.min_p.view(-1),
        state.greedy.view(-1),
    )
    return got, process(logits, state)


@pytest.mark.parametrize(
    "per_sequence,width,kept",
    [(2, 2100, slice(0, 2)), (1, 70, slice(0, 3)), (2, 70, slice(3, 4)), (1, 70, slice(0, 9)), (1, 2100, slice(4, 5)),
     real(4, 248320, slice(0, 1)), real(4, 248320, slice(0, 9))],
)  # fmt: skip
def test_probabilities_after_all_filters(per_sequence: int, width: int, kept: slice) -> None:
    params = CHOICES[kept]
    logits = 3 * randn(len(params), per_sequence, width, seed=7)
    got, expected = processed(logits, params)
    assert torch.equal(got > 0, expected > 0)
    assert error(got, expected) < 1e-6


def test_ties_at_the_cuts_are_kept_as_the_definition_keeps_them() -> None:
    logits = torch.zeros(4, 1, 3000, device=DEVICE)
    logits[:, :, ::7] = 1.0
    logits[:, :, [5, 2900]] = 9.0
    params = [
        SamplingParams(top_k=10), SamplingParams(top_p=0.95), SamplingParams(top_k=2, top_p=0.3),
        SamplingParams(top_k=400, top_p=0.9999, min_p=0.0004),
    ]  # fmt: skip
    got, expected = processed(logits, params)
    assert torch.equal(got > 0, expected > 0)
    assert error(got, expected) < 1e-6
    # 2 ids at 9, 429 at 1, 2569 at 0.
    one, zero = math.exp(-8), math.exp(-9)
    of_zeros = math.ceil((0.95 * (2 + 429 * one + 2569 * zero) - 2 - 429 * one) / zero)
    assert (got > 0).sum(-1).view(-1).tolist() == [431, 431 + of_zeros, 1, 2]


@pytest.mark.parametrize("width", [300, real(151936)])
def test_cuts_among_many_that_are_close(width: int) -> None:
    """More logits in question than are looked at together, some of them equal, far below the largest or near it."""
    close = 1 + 1e-5 * torch.arange(width, device=DEVICE).remainder(width * 3 // 4).float()
    logits = torch.stack([close, close.flip(0), close / 100, close * 3])[:, None].contiguous()
    logits[:, :, 77] += torch.tensor([6.0, 0.004, 0.0, 30.0], device=DEVICE)[:, None]
    for params in (
        [SamplingParams(top_k=width // 2 + n) for n in range(4)],
        [SamplingParams(top_p=share) for share in (0.97, 0.3, 0.62, 0.999)],
        [SamplingParams(top_k=width // 3, top_p=0.5), SamplingParams(top_k=width - 1), SamplingParams(top_p=0.999999),
         SamplingParams(temperature=0.01, top_k=width, top_p=0.9)],
    ):  # fmt: skip
        got, expected = processed(logits, params)
        assert ((got > 0) != (expected > 0)).sum() <= 1
        assert error(got, expected) < 1e-5


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_filters_on_coarse_logits(data: st.DataObject) -> None:
    """Logits as coarse as bfloat16's, so full of ties, some minus infinity; some requests without filters."""
    width = data.draw(st.integers(17, 600))
    scale = data.draw(st.sampled_from([0.02, 0.5, 3.0, 12.0, 80.0]))
    logits = (scale * randn(3, 1, width, seed=data.draw(st.integers(0, 999)))).bfloat16().float()
    logits[:, :, data.draw(st.integers(1, width)) :: 3] = -torch.inf
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.3, 1.0, 2.5])),
            top_k=data.draw(st.sampled_from([0, 1, 2, 20, width // 2, width, width + 5])),
            top_p=data.draw(st.sampled_from([1.0, 0.999, 0.8, 0.31, 0.01])),
            min_p=data.draw(st.sampled_from([0.0, 0.03])),
        )
        for _ in range(3)
    ]
    got, expected = processed(logits, params)
    # A share that ends a few units in the last place from a logit's edge may fall on either side of it.
    assert ((got > 0) != (expected > 0)).sum() <= 1
    assert error(got, expected) < 1e-5


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_unequal_logits_of_equal_distance_are_kept_together() -> None:
    """Zeros of both signs, and differences that the distance from the largest, or its quotient, rounds away."""
    width = 4096
    logits = torch.full((4, 1, width), -5.0, device=DEVICE)
    logits[0, 0, :2560:2], logits[0, 0, [2563, 2693]], logits[0, 0, 7] = -0.0, 0.0, 2.0
    logits[1], logits[1, 0, 2000], logits[1, 0, 2500] = 1 - 2**-24, 1.0, 4.0
    logits[2] = randn(1, width)
    logits[3, 0, :2000], logits[3, 0, 3000], logits[3, 0, 7] = 1e-7, 3e-7, 20.0
    params = [SamplingParams(top_k=k, temperature=t) for k, t in ((3, 1.0), (2, 1.0), (5, 1e39), (2, 9.0))]
    got, expected = processed(logits, params)
    assert torch.equal(got > 0, expected > 0)
    assert (got > 0).sum(-1).view(-1).tolist() == [1283, width, width, 2001]
    assert error(got, expected) < 1e-6
    assert (got.double().sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("drafted", [70, 500, 2000])
def test_small_k_of_a_draft_vocabulary(drafted: int) -> None:
    """Most logits are minus infinity, on one side or in between."""
    logits = torch.full((3, 2, max(3000, 2 * drafted)), -torch.inf, device=DEVICE)
    logits[0, :, :drafted] = randn(2, drafted)
    logits[1, :, -drafted:] = randn(2, drafted, seed=1)
    logits[2, :, :: logits.shape[-1] // drafted][:, :drafted] = randn(2, drafted, seed=2)
    params = [SamplingParams(top_k=20, top_p=0.8), SamplingParams(top_k=64), SamplingParams(top_k=40, min_p=0.2)]
    got, expected = processed(logits, params)
    assert torch.equal(got > 0, expected > 0)
    assert error(got, expected) < 1e-6


def test_a_row_has_the_same_bits_alone_as_in_any_batch() -> None:
    """Whatever kernels the other requests need, and also raised to float32 for their sake."""
    params = [*CHOICES, SamplingParams(top_k=65, top_p=0.9), SamplingParams(top_k=64, top_p=0.9)]
    logits = (3 * randn(len(params), 2, 2500, seed=3)).bfloat16()
    together, _ = processed(logits.float(), params)
    for i, own in enumerate(params):
        alone, _ = processed(logits[i : i + 1].contiguous(), [own])
        assert torch.equal(alone[0], together[i]), own


def test_logits_of_minus_infinity_are_never_kept_with_mass() -> None:
    logits = randn(2, 1, 60)
    logits[:, :, 10:] = -torch.inf
    got, expected = processed(logits, [SamplingParams(top_k=30), SamplingParams(top_p=0.99)])
    assert error(got, expected) < 1e-6
    assert (got[:, :, 10:] == 0).all()


@pytest.mark.parametrize("steps,width", [(1, 40), (3, 4500), real(3, 248320)])
def test_rejection_keeps_and_draws_what_the_definition_does(steps: int, width: int) -> None:
    batch = 4
    target = torch.softmax(2 * randn(batch, steps + 1, width), -1)
    draft = torch.softmax(2 * randn(batch, steps, width, seed=1), -1)
    draft[0] = target[0, :-1]
    target[1, :, ::3] = 0
    target[1] /= target[1].sum(-1, keepdim=True)
    seen = set()
    for seed in range(5):
        drafts = sampling.sample(draft, uniform(batch, steps, seed=50 + seed))
        draws = uniform(batch, steps + 1, sampling.LANES, seed=seed)
        expected = sampling.accept(target, drafts, draft, draws)
        got = tokens_triton.accept(target, drafts, draft, draws[..., sampling.ACCEPT], draws[..., sampling.DRAW])
        assert torch.equal(got[1], expected[1])
        for b, n in enumerate(expected[1].tolist()):
            assert torch.equal(got[0][b, : n + 1], expected[0][b, : n + 1])
        seen |= set(expected[1].tolist())
    assert {0, steps} <= seen


def test_a_refused_draft_with_no_residual_is_replaced_by_the_target_itself() -> None:
    """Rounding can refuse a token where p and q are equal everywhere: the bonus then follows p."""
    probs = torch.softmax(randn(1, 2, 50), -1)
    draws = uniform(1, 2, 2, seed=3)
    draws[0, 0, 0] = 1.0
    drafts = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    draft = probs[:, :1].contiguous()
    tokens, accepted = tokens_triton.accept(probs, drafts, draft, draws[..., 0], draws[..., 1])
    assert accepted.tolist() == [0]
    assert tokens[0, 0] == sampling.sample(probs[:, 0], draws[:, 0, 1])
