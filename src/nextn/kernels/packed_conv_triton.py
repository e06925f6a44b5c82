"""The Triton kernel of `train.contexts.packed_conv`: a short causal convolution and silu inside documents."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
CHANNELS = 256


@triton.jit
def _conv(
    x: tl.tensor,
    documents: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    x_row: tl.tensor,
    KERNEL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """BR rows and BC channels."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < channels
    mine = tl.load(documents + row, mask=row < rows, other=-1)
    total = tl.zeros((BR, BC), tl.float32)
    for back in tl.static_range(KERNEL):
        from_row = row - back
        theirs = tl.load(documents + from_row, mask=(from_row >= 0) & (row < rows), other=-2)
        same = (theirs == mine) & ((mine >= 0) | (back == 0))
        same = same[:, None] & inside[None, :]
        at = from_row.to(tl.int64)[:, None] * x_row + channel[None, :]
        tap = tl.load(weight + channel * KERNEL + (KERNEL - 1 - back), mask=inside, other=0.0).to(tl.float32)
        total += tap[None, :] * tl.load(x + at, mask=same, other=0.0).to(tl.float32)
    result = total * tl.sigmoid(total)
    to = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out + to, result.to(out.dtype.element_ty), mask=(row < rows)[:, None] & inside[None, :])


def packed_conv(documents: Tensor, mixed: Tensor, weight: Tensor) -> Tensor:
    """Without a gradient; summed in float32.

    Args:
        documents: [1, T], equal numbers are one document; -1 is padding, whose rows see themselves alone.
        mixed: [1, T, channels], channels side by side.
        weight: [channels, kernel].
    Returns:
        [1, T, channels].
    """
    _, rows, channels = mixed.shape
    weight = weight.contiguous()
    out = torch.empty(1, rows, channels, dtype=mixed.dtype, device=mixed.device)
    _conv[(triton.cdiv(rows, ROWS), triton.cdiv(channels, CHANNELS))](
        mixed,
        documents,
        weight,
        out,
        rows,
        channels,
        mixed.stride(1),
        KERNEL=weight.shape[1],
        BR=ROWS,
        BC=CHANNELS,
        num_warps=4,
    )
    return out
