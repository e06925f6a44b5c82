"""The Triton kernel of `delta.delta_inputs` for a prompt's many rows: convolution, decay and write strength."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.delta import DeltaWeights

ROWS = 16
CHANNELS = 256


@triton.jit
def _inputs(
    x: tl.tensor,
    conv: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    ring: tl.tensor,
    slot: tl.tensor,
    position: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    decay: tl.tensor,
    strength: tl.tensor,
    rows: tl.tensor,
    x_row: tl.tensor,
    columns: tl.tensor,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    V_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KERNEL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
) -> None:
    """BR rows and BC channels of a sequence; the last program of a row block takes the heads' scalars."""
    WIDTH: tl.constexpr = 2 * KEYS + VALUES
    batch = tl.program_id(2)
    row = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    real = row < rows
    line = x + (batch * rows + row).to(tl.int64) * x_row
    to = (batch * rows + row).to(tl.int64)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        head = tl.arange(0, HEADS)[None, :]
        each = real & (head < V_HEADS)
        b = tl.load(line + WIDTH + VALUES + head, mask=each, other=0.0).to(tl.float32)
        a = tl.load(line + WIDTH + VALUES + V_HEADS + head, mask=each, other=0.0).to(tl.float32)
        a += tl.load(dt_bias + head, mask=head < V_HEADS, other=0.0).to(tl.float32)
        rate = -tl.exp(tl.load(a_log + head, mask=head < V_HEADS, other=0.0).to(tl.float32))
        grown = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        tl.store(decay + to * V_HEADS + head, rate * grown, mask=each)
        tl.store(strength + to * V_HEADS + head, tl.sigmoid(b), mask=each)
    else:
        channel = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
        inside = channel < WIDTH
        at = tl.load(slot + batch).to(tl.int64)
        first = tl.load(position + batch)
        total = tl.zeros((BR, BC), tl.float32)
        for back in tl.static_range(KERNEL):
            tap = tl.load(conv + channel * KERNEL + (KERNEL - 1 - back), mask=inside, other=0.0).to(tl.float32)
            value = tl.load(line - back * x_row + channel, mask=real & inside & (row >= back), other=0.0)
            total += tap * value.to(tl.float32)
            if back > 0:
                before = first + row - back
                known = real & inside & (row < back) & (before >= 0)
                past = (at * columns + (before + columns) % columns) * WIDTH + channel
                total += tap * tl.load(ring + past, mask=known, other=0.0).to(tl.float32)
        result = (total * tl.sigmoid(total)).to(q.dtype.element_ty)
        some = real & inside
        tl.store(q + to * KEYS + channel, result, mask=some & (channel < KEYS))
        tl.store(k + to * KEYS + channel - KEYS, result, mask=some & (channel >= KEYS) & (channel < 2 * KEYS))
        tl.store(v + to * VALUES + channel - 2 * KEYS, result, mask=some & (channel >= 2 * KEYS))


def delta_inputs(
    weights: DeltaWeights, x: Tensor, ring: Tensor, slot: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`delta.delta_inputs` for a stored x [batch * rows, N]; q, k, v are in the ring's dtype, g and beta float32."""
    w = weights
    batch = slot.shape[0]
    rows = x.shape[0] // batch
    keys, values = w.k_heads * w.k_dim, w.v_heads * w.v_dim
    q, k = (torch.empty(batch, rows, w.k_heads, w.k_dim, dtype=ring.dtype, device=x.device) for _ in range(2))
    v = torch.empty(batch, rows, w.v_heads, w.v_dim, dtype=ring.dtype, device=x.device)
    g, beta = (torch.empty(batch, rows, w.v_heads, dtype=torch.float32, device=x.device) for _ in range(2))
    _inputs[(triton.cdiv(rows, ROWS), triton.cdiv(2 * keys + values, CHANNELS) + 1, batch)](
        x,
        w.conv,
        w.a_log,
        w.dt_bias,
        ring,
        slot,
        position,
        q,
        k,
        v,
        g,
        beta,
        rows,
        x.stride(0),
        ring.shape[1],
        KEYS=keys,
        VALUES=values,
        V_HEADS=w.v_heads,
        HEADS=triton.next_power_of_2(w.v_heads),
        KERNEL=w.conv.shape[1],
        BR=ROWS,
        BC=CHANNELS,
        num_warps=4,
    )
    return q, k, v, g, beta
