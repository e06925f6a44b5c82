"""The Triton kernel of `engine.random.uniforms`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser (`engine.random`); right shifts are logical, products wrap."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniforms(
    seed: tl.tensor,
    position: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    per_sequence: tl.tensor,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, lane = at // LANES, at % LANES
    known = row < rows
    first = tl.load(seed + row // per_sequence, mask=known, other=0)
    place = tl.load(position + row, mask=known, other=0)
    step = tl.full((BLOCK,), -7046029254386353131, tl.int64)
    state = _mix(_mix(first + step) + (place + 1) * step)
    number = _mix(state + (lane + 1).to(tl.int64) * step)
    tl.store(out + at, ((number >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * (1.0 / 9007199254740992), mask=known)


def uniforms(seed: Tensor, position: Tensor, lanes: int, *, pdl: bool = False) -> Tensor:
    """`random.uniforms` of int64 seeds [B] and positions [B] or [B, T]; returns the shape of positions and lanes."""
    position = position.contiguous()
    out = torch.empty(*position.shape, lanes, dtype=torch.float64, device=position.device)
    rows, block = position.numel(), 128
    _uniforms[(triton.cdiv(rows * lanes, block),)](
        seed.contiguous(), position, out, rows, rows // seed.shape[0], LANES=lanes, BLOCK=block, PDL=pdl, launch_pdl=pdl
    )
    return out
