"""The delta step's causal convolution, of inputs in the ring and of the step's own rows: parts of its Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from nextn.kernels.load_triton import load_rows


@triton.jit
def _past(
    ring: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    before: tl.tensor,
    columns: tl.tensor,
    CHANNELS: tl.constexpr,
    BACK: tl.constexpr,
) -> tl.tensor:
    """Inputs BACK positions before each row that lie in the ring: of the first BACK rows, 0 below position 0."""
    position = before + row
    known = (row < BACK) & (position >= 0) & (channel >= 0)
    at = (position + columns) % columns * CHANNELS + channel
    return tl.load(ring + at, mask=known, other=0.0)


@triton.jit
def _tap(conv: tl.tensor, channel: tl.tensor, BACK: tl.constexpr, KERNEL: tl.constexpr) -> tl.tensor:
    """The convolution's weights for inputs BACK positions ago; 0 past its reach."""
    inside = (channel >= 0) & (channel * 0 + BACK < KERNEL)
    return tl.load(conv + channel * KERNEL + (KERNEL - 1 - BACK), mask=inside, other=0.0)


@triton.jit
def known_inputs(
    ring: tl.tensor,
    conv: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What some channels' convolution takes from earlier rounds: inputs 1 to 3 positions ago, weights of 0 to 3."""
    return (
        _past(ring, row, channel, first - 1, columns, CHANNELS, 1),
        _past(ring, row, channel, first - 2, columns, CHANNELS, 2),
        _past(ring, row, channel, first - 3, columns, CHANNELS, 3),
        _tap(conv, channel, 0, KERNEL),
        _tap(conv, channel, 1, KERNEL),
        _tap(conv, channel, 2, KERNEL),
        _tap(conv, channel, 3, KERNEL),
    )


@triton.jit
def convolved(
    known: tl.tensor,
    own: tl.tensor,
    lines: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    x_row: tl.tensor,
    x_split: tl.tensor,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """The convolution and its activation, of `known_inputs` and the rows' own inputs.

    Fused multiply-adds by name, so that the same row rounds alike in a step of any number of rows.
    """
    x1, x2, x3, w0, w1, w2, w3 = known
    x1, x2, x3 = x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    if ROWS > 1:
        x1 += row_inputs(lines, row, channel, x_row, x_split, ROWS, SPLITS, 1, dtype)
    if ROWS > 2:
        x2 += row_inputs(lines, row, channel, x_row, x_split, ROWS, SPLITS, 2, dtype)
    if ROWS > 3:
        x3 += row_inputs(lines, row, channel, x_row, x_split, ROWS, SPLITS, 3, dtype)
    total = tl.fma(w1.to(tl.float32), x1, w0.to(tl.float32) * own)
    total = tl.fma(w3.to(tl.float32), x3, tl.fma(w2.to(tl.float32), x2, total))
    return total * tl.sigmoid(total)


@triton.jit
def row_inputs(
    lines: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    x_row: tl.tensor,
    x_split: tl.tensor,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BACK: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Inputs BACK positions before each row that are rows of this step."""
    inside = (row >= BACK) & (row < ROWS) & (channel >= 0)
    return load_rows(lines, (row - BACK) * x_row + channel, inside, x_split, SPLITS, dtype)


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    return x * tl.sigmoid(x)
