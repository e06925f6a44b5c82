"""The counter-based generator: against plain integers, and for uniformity and independence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nextn.engine.random import LANES, uniforms

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
int64s = st.integers(-(2**63), 2**63 - 1)


def finalise(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def reference(seed: int, position: int, lane: int) -> float:
    """The same number by unbounded integers: three splitmix64 finalisers over seed, position and lane."""
    state = finalise((seed + GOLDEN) & WORD)
    state = finalise((state + (position + 1) * GOLDEN) & WORD)
    return (finalise((state + (lane + 1) * GOLDEN) & WORD) >> 11) / 2**53


def test_the_finaliser_is_splitmix64() -> None:
    # The published first outputs of SplitMix64 seeded with 1234567 (Rosetta Code).
    outputs = [finalise((1234567 + n * GOLDEN) & WORD) for n in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(int64s, st.integers(0, 2**40), st.integers(1, 5))
def test_equals_plain_integer_arithmetic(seed: int, position: int, count: int) -> None:
    got = uniforms(torch.tensor([seed]), torch.tensor([position]), count)
    assert got.dtype == torch.float64
    assert got.tolist() == [[reference(seed, position, lane) for lane in range(count)]]


@settings(max_examples=25)
@given(st.lists(int64s, min_size=1, max_size=4), st.integers(0, 10**6), st.integers(1, 5))
def test_a_number_does_not_depend_on_its_batch(seeds: list[int], start: int, rows: int) -> None:
    batch = torch.tensor(seeds)
    positions = start + torch.arange(len(seeds) * rows).reshape(len(seeds), rows)
    together = uniforms(batch, positions)
    assert together.shape == (len(seeds), rows, LANES)
    for b in range(len(seeds)):
        for row in range(rows):
            alone = uniforms(batch[b : b + 1], positions[b, row : row + 1], 2)
            assert torch.equal(alone[0], together[b, row, :2])


def table(seeds: int, positions: int, count: int) -> torch.Tensor:
    """[seeds, positions, count] of small consecutive seeds and positions, the hardest case for a hash."""
    return uniforms(torch.arange(seeds), torch.arange(positions).expand(seeds, positions), count)


def test_range_and_grid() -> None:
    u = table(64, 512, 8)
    assert 0 <= u.min().item() < 1e-4
    assert 1 - 1e-4 < u.max().item() < 1
    scaled = u * 2**53
    assert torch.equal(scaled, scaled.round())
    # Odd multiples of 2**-53 occur, so all 53 bits are in use.
    odd = (scaled.long() & 1).double().mean().item()
    assert abs(odd - 0.5) < 0.005


def test_uniform_over_256_bins() -> None:
    u = table(64, 512, 8).flatten()
    assert stats.chisquare(torch.histc(u, 256, 0, 1).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seed", "position", "lane"])
@pytest.mark.parametrize("apart", [1, 2, 3])
def test_neighbours_are_independent(axis: int, apart: int) -> None:
    u = table(64, 512, 8)
    size = u.shape[axis]
    left, right = u.narrow(axis, 0, size - apart).flatten(), u.narrow(axis, apart, size - apart).flatten()
    cell = (left * 16).long() * 16 + (right * 16).long()
    assert stats.chisquare(torch.bincount(cell, minlength=256).numpy()).pvalue > 1e-3
    # 200,000 pairs and more: a correlation of 0.01 is over 4 standard errors.
    assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1].item()) < 0.01


def test_one_bit_of_seed_or_position_changes_half_the_bits() -> None:
    seeds = torch.arange(2000) * 7919
    base = (uniforms(seeds, seeds, 1) * 2**53).long()
    for bit in (0, 1, 5, 20):
        for other in (uniforms(seeds ^ (1 << bit), seeds, 1), uniforms(seeds, seeds ^ (1 << bit), 1)):
            flipped = base ^ (other * 2**53).long()
            share = sum(((flipped >> b) & 1).double().mean().item() for b in range(53)) / 53
            assert abs(share - 0.5) < 0.01
