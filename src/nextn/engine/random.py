"""Draw uniform numbers that depend on a request's seed and a token's position, and on nothing else.

A counter-based generator: no state to keep, so the batch around a request, the draft length and the device leave
its numbers alone, and a captured graph replays nothing stale. Integer arithmetic only, so every device agrees.
"""

from __future__ import annotations

import torch
from torch import Tensor

ACCEPT, DRAW, DRAFT = range(3)
"""The numbers of one position: the test of its draft token, the draw of a token there, the draw of a draft token.
Reusing DRAFT at a position drafted again is sound: a draft token thrown away untested has decided nothing."""

LANES = 3
"""How many numbers a position has."""


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


# Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014); finaliser: Stafford's mix 13.
_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64 bits. Products wrap."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def uniforms(seed: Tensor, position: Tensor, count: int = LANES) -> Tensor:
    """Uniform numbers on the grid of 2**-53 in [0, 1).

    Args:
        seed: [B] int64.
        position: [B] or [B, T] int64, the position that the token drawn will take.
        count: numbers a position; the first n of a larger count are those of count n.

    Returns:
        [B, count] or [B, T, count], float64.
    """
    seed = seed.reshape(seed.shape + (1,) * (position.dim() - 1))
    lane = torch.arange(1, count + 1, device=position.device)
    state = _mix(_mix(seed + _STEP) + (position + 1) * _STEP)
    return _shift(_mix(state.unsqueeze(-1) + lane * _STEP), 11).double() * 2.0**-53
