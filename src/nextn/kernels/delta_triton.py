"""The Triton kernel of `delta`: one program a value head and sequence does the whole step, its state in registers.

With dependent launch the state is loaded, and in replay also brought up to date and stored, while the input product
before it still runs; see `support` for what that asks of the caller.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.delta import DeltaLog, DeltaWeights
from nextn.kernels.load_triton import load_rows
from nextn.kernels.support import splits_of

MAX_ROWS = 9
WARPS = 16


@triton.jit
def _convolved(
    x: tl.tensor,
    ring: tl.tensor,
    conv: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    first: tl.tensor,
    stored: tl.tensor,
    x_row: tl.tensor,
    x_split: tl.tensor,
    ring_columns: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    SPLITS: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """silu of the convolution for rows [R, 1] and channels [1, C]; channels below `stored` go into the ring."""
    total = row.to(tl.float32) * 0.0 + channel * 0.0
    for back in tl.static_range(KERNEL):
        weight = tl.load(conv + channel * KERNEL + (KERNEL - 1 - back)).to(tl.float32)
        inside = (row >= back) & (row < ROWS) & (channel >= 0)
        value = load_rows(x, (row - back) * x_row + channel, inside, x_split, SPLITS, dtype)
        if back == 0:
            column = (first + row) % ring_columns
            tl.store(ring + column * CHANNELS + channel, value.to(dtype), mask=inside & (channel < stored))
        else:
            before = first + row - back
            column = (before + ring_columns) % ring_columns
            known = (row < back) & (before >= 0) & (channel >= 0)
            value += tl.load(ring + column * CHANNELS + channel, mask=known, other=0.0).to(tl.float32)
        total += weight * value
    return total * tl.sigmoid(total)


@triton.jit
def _row(tile: tl.tensor, row: tl.tensor, i: tl.tensor) -> tl.tensor:
    """Row i of a tile [R, C], given its row numbers [R, 1]."""
    return tl.sum(tl.where(row == i, tile, 0.0), 0)


@triton.jit
def _delta(
    x: tl.tensor,
    conv: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    scale: tl.tensor,
    ring: tl.tensor,
    states: tl.tensor,
    log_k: tl.tensor,
    log_u: tl.tensor,
    log_g: tl.tensor,
    slot: tl.tensor,
    position: tl.tensor,
    select: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    x_split: tl.tensor,
    ring_columns: tl.tensor,
    log_columns: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """SNAPSHOTS is how many a slot has, or 0 for replay."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    batch = tl.program_id(1)
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    key_head = head // GROUP
    dk = tl.arange(0, K_DIM)
    dv = tl.arange(0, V_DIM)
    row = tl.arange(0, PADDED)[:, None]
    tile = dk[:, None] * V_DIM + dv[None, :]
    at = tl.load(slot + batch).to(tl.int64)
    first = tl.load(position + batch).to(tl.int32)
    chosen = tl.load(select + batch).to(tl.int32)

    if SNAPSHOTS == 0:
        where = states + (at * V_HEADS + head) * (K_DIM * V_DIM) + tile
        state = tl.load(where)
        for i in range(chosen):
            column = at * log_columns + (first - chosen + i) % log_columns
            key = tl.load(log_k + (column * K_HEADS + key_head) * K_DIM + dk)
            update = tl.load(log_u + (column * V_HEADS + head) * V_DIM + dv)
            decay = tl.exp(tl.load(log_g + column * V_HEADS + head))
            state = tl.fma(tl.broadcast_to(key[:, None], (K_DIM, V_DIM)), update[None, :], state * decay)
        tl.store(where, state)
    else:
        state = tl.load(states + ((at * SNAPSHOTS + chosen) * V_HEADS + head) * (K_DIM * V_DIM) + tile)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    weight = tl.load(scale + dv).to(tl.float32)

    if PDL:
        gdc_wait()
    dtype = out.dtype.element_ty
    lines = x + batch * ROWS * x_row
    window = ring + at * ring_columns * CHANNELS
    # Value heads that share a key head all convolve its channels; one of them stores.
    q_channel = key_head * K_DIM + dk[None, :]
    k_channel = q_channel + K_HEADS * K_DIM
    v_channel = 2 * K_HEADS * K_DIM + head * V_DIM + dv[None, :]
    stored = tl.where(head % GROUP == 0, CHANNELS, 0)
    q = _convolved(
        lines,
        window,
        conv,
        row,
        q_channel,
        first,
        stored,
        x_row,
        x_split,
        ring_columns,
        ROWS,
        CHANNELS,
        KERNEL,
        SPLITS,
        dtype,
    )
    k = _convolved(
        lines,
        window,
        conv,
        row,
        k_channel,
        first,
        stored,
        x_row,
        x_split,
        ring_columns,
        ROWS,
        CHANNELS,
        KERNEL,
        SPLITS,
        dtype,
    )
    v = _convolved(
        lines,
        window,
        conv,
        row,
        v_channel,
        first,
        CHANNELS,
        x_row,
        x_split,
        ring_columns,
        ROWS,
        CHANNELS,
        KERNEL,
        SPLITS,
        dtype,
    )
    q *= tl.rsqrt(tl.sum(q * q, 1)[:, None] + 1e-6) * (K_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 1)[:, None] + 1e-6)
    qk = tl.sum(q * k, 1)[:, None]
    heads = CHANNELS + V_HEADS * V_DIM
    b = load_rows(lines, row * x_row + heads + head, row < ROWS, x_split, SPLITS, dtype)
    a = load_rows(lines, row * x_row + heads + V_HEADS + head, row < ROWS, x_split, SPLITS, dtype) + bias
    g = rate * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    beta = tl.sigmoid(b)
    decay = tl.exp(g)
    if SNAPSHOTS == 0:
        entry = at * log_columns + (first + row) % log_columns
        keys = log_k + (entry * K_HEADS + key_head) * K_DIM + dk[None, :]
        tl.store(keys, k, mask=(row < ROWS) & (k_channel < stored))
        tl.store(log_g + entry * V_HEADS + head, g, mask=row < ROWS)

    for i in tl.range(0, ROWS, num_stages=1):
        gate_at = i * x_row + CHANNELS + head * V_DIM + dv
        gate = load_rows(lines, gate_at, dv < V_DIM, x_split, SPLITS, dtype)
        qi = _row(q, row, i)
        ki = _row(k, row, i)
        state = state * _row(decay, row, i)
        u = _row(beta, row, i) * (_row(v, row, i) - tl.sum(ki[:, None] * state, 0))
        o = tl.sum(qi[:, None] * state, 0) + _row(qk, row, i) * u
        state = tl.fma(tl.broadcast_to(ki[:, None], (K_DIM, V_DIM)), u[None, :], state)
        o *= tl.rsqrt(tl.sum(o * o) / V_DIM + eps) * weight * gate * tl.sigmoid(gate)
        tl.store(out + (batch * ROWS + i) * (V_HEADS * V_DIM) + head * V_DIM + dv, o.to(dtype))
        if SNAPSHOTS == 0:
            logged = at * log_columns + (first + i) % log_columns
            tl.store(log_u + (logged * V_HEADS + head) * V_DIM + dv, u)
        else:
            tl.store(states + ((at * SNAPSHOTS + i) * V_HEADS + head) * (K_DIM * V_DIM) + tile, state)


def delta_snapshots(
    weights: DeltaWeights,
    x: Tensor,
    ring: Tensor,
    states: Tensor,
    slot: Tensor,
    position: Tensor,
    select: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """`delta.delta_snapshots`; states are float32.

    Raises:
        ValueError: more than 9 rows, or head dims that are no powers of two.
    """
    rows = _checked(weights, x, ring, slot)
    if states.shape[1] < rows:
        raise ValueError(f"{rows} rows need as many snapshots; there are {states.shape[1]}")
    log = DeltaLog(states, states, states)
    return _launch(weights, x, ring, states, log, slot, position, select, states.shape[1], pdl)


def delta_replay(
    weights: DeltaWeights,
    x: Tensor,
    ring: Tensor,
    states: Tensor,
    log: DeltaLog,
    slot: Tensor,
    position: Tensor,
    pending: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """`delta.delta_replay`; states and log are float32, pending + rows of no sequence exceed the log's columns.

    Raises:
        ValueError: more than 9 rows, or head dims that are no powers of two.
    """
    _checked(weights, x, ring, slot)
    return _launch(weights, x, ring, states, log, slot, position, pending, 0, pdl)


def _checked(weights: DeltaWeights, x: Tensor, ring: Tensor, slot: Tensor) -> int:
    rows = x.shape[-2] // slot.shape[0]
    kernel = weights.conv.shape[1]
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"the fused delta step takes 1 to {MAX_ROWS} rows, not {rows}")
    if weights.k_dim & (weights.k_dim - 1) or weights.v_dim & (weights.v_dim - 1):
        raise ValueError(f"head dims {weights.k_dim} and {weights.v_dim} must be powers of two")
    if ring.shape[1] < kernel - 1 + rows:
        raise ValueError(f"{rows} rows need {kernel - 1 + rows} columns of inputs; there are {ring.shape[1]}")
    return rows


def _launch(
    weights: DeltaWeights,
    x: Tensor,
    ring: Tensor,
    states: Tensor,
    log: DeltaLog,
    slot: Tensor,
    position: Tensor,
    select: Tensor,
    snapshots: int,
    pdl: bool,
) -> Tensor:
    w = weights
    batch = slot.shape[0]
    rows = x.shape[-2] // batch
    out = torch.empty(x.shape[-2], w.v_heads * w.v_dim, dtype=ring.dtype, device=x.device)
    _delta[(w.v_heads, batch)](
        x,
        w.conv,
        w.a_log,
        w.dt_bias,
        w.scale,
        ring,
        states,
        log.k,
        log.u,
        log.g,
        slot,
        position,
        select,
        out,
        x.stride(-2),
        x.stride(0),
        ring.shape[1],
        log.k.shape[1],
        w.eps,
        ROWS=rows,
        PADDED=triton.next_power_of_2(rows),
        K_HEADS=w.k_heads,
        V_HEADS=w.v_heads,
        K_DIM=w.k_dim,
        V_DIM=w.v_dim,
        KERNEL=w.conv.shape[1],
        SNAPSHOTS=snapshots,
        SPLITS=splits_of(x),
        PDL=pdl,
        num_warps=min(WARPS, max(w.k_dim * w.v_dim // 1024, 1)),
        launch_pdl=pdl,
    )
    return out
