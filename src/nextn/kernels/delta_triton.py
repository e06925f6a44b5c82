"""The Triton kernel of `delta`: one program a value head and sequence does the whole step, its state in registers.

With dependent launch the state is loaded, and in replay also brought up to date and stored, while the input product
before it still runs; see `support` for what that asks of the caller.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.delta import DeltaLog, DeltaWeights
from nextn.kernels.load_triton import load_rows
from nextn.kernels.support import Num, Ptr, splits_of

MAX_KERNEL = 4
MAX_ROWS = 9


@triton.jit
def _ring_column(ring: Ptr, channel: Num, position: Num, columns: Num, CHANNELS: tl.constexpr) -> Any:
    """The inputs of one position, 0 below position 0."""
    at = (position + columns) % columns
    known = tl.where(position >= 0, CHANNELS, 0)
    return tl.load(ring + at * CHANNELS + channel, mask=channel < known, other=0.0).to(tl.float32)


@triton.jit
def _tap(conv: Ptr, channel: Num, back: tl.constexpr, KERNEL: tl.constexpr) -> Any:
    """The weight of the input `back` positions ago; 0 past the kernel's reach."""
    if back < KERNEL:
        weight = tl.load(conv + channel * KERNEL + (KERNEL - 1 - back)).to(tl.float32)
    else:
        weight = channel.to(tl.float32) * 0.0
    return weight


@triton.jit
def _silu(x: Num) -> Any:
    return x * tl.sigmoid(x)


@triton.jit
def _delta(
    x: Ptr,
    conv: Ptr,
    a_log: Ptr,
    dt_bias: Ptr,
    scale: Ptr,
    ring: Ptr,
    states: Ptr,
    log_k: Ptr,
    log_u: Ptr,
    log_g: Ptr,
    slot: Ptr,
    position: Ptr,
    select: Ptr,
    out: Ptr,
    x_row: Num,
    x_split: Num,
    ring_columns: Num,
    log_columns: Num,
    eps: Num,
    ROWS: tl.constexpr,
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

    window = ring + at * ring_columns * CHANNELS
    cq = key_head * K_DIM + dk
    ck = cq + K_HEADS * K_DIM
    cv = 2 * K_HEADS * K_DIM + head * V_DIM + dv
    wq0, wq1, wq2, wq3 = (
        _tap(conv, cq, 0, KERNEL),
        _tap(conv, cq, 1, KERNEL),
        _tap(conv, cq, 2, KERNEL),
        _tap(conv, cq, 3, KERNEL),
    )
    wk0, wk1, wk2, wk3 = (
        _tap(conv, ck, 0, KERNEL),
        _tap(conv, ck, 1, KERNEL),
        _tap(conv, ck, 2, KERNEL),
        _tap(conv, ck, 3, KERNEL),
    )
    wv0, wv1, wv2, wv3 = (
        _tap(conv, cv, 0, KERNEL),
        _tap(conv, cv, 1, KERNEL),
        _tap(conv, cv, 2, KERNEL),
        _tap(conv, cv, 3, KERNEL),
    )
    q1 = _ring_column(window, cq, first - 1, ring_columns, CHANNELS)
    k1 = _ring_column(window, ck, first - 1, ring_columns, CHANNELS)
    v1 = _ring_column(window, cv, first - 1, ring_columns, CHANNELS)
    q2 = _ring_column(window, cq, first - 2, ring_columns, CHANNELS)
    k2 = _ring_column(window, ck, first - 2, ring_columns, CHANNELS)
    v2 = _ring_column(window, cv, first - 2, ring_columns, CHANNELS)
    q3 = _ring_column(window, cq, first - 3, ring_columns, CHANNELS)
    k3 = _ring_column(window, ck, first - 3, ring_columns, CHANNELS)
    v3 = _ring_column(window, cv, first - 3, ring_columns, CHANNELS)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    weight = tl.load(scale + dv).to(tl.float32)
    # Value heads that share a key head all compute its rows; one of them stores.
    stored = tl.where(head % GROUP == 0, K_DIM, 0)
    dtype = out.dtype.element_ty

    if PDL:
        gdc_wait()
    for i in tl.static_range(ROWS):
        row = batch * ROWS + i
        line = x + row * x_row
        q0 = load_rows(line, cq, dk >= 0, x_split, SPLITS, dtype)
        k0 = load_rows(line, ck, dk >= 0, x_split, SPLITS, dtype)
        v0 = load_rows(line, cv, dv >= 0, x_split, SPLITS, dtype)
        gate = load_rows(line, CHANNELS + head * V_DIM + dv, dv >= 0, x_split, SPLITS, dtype)
        b = load_rows(line, CHANNELS + V_HEADS * V_DIM + head, head >= 0, x_split, SPLITS, dtype)
        a = load_rows(line, CHANNELS + V_HEADS * V_DIM + V_HEADS + head, head >= 0, x_split, SPLITS, dtype)
        column = window + (first + i) % ring_columns * CHANNELS
        tl.store(column + cq, q0.to(dtype), mask=dk < stored)
        tl.store(column + ck, k0.to(dtype), mask=dk < stored)
        tl.store(column + cv, v0.to(dtype))
        q = _silu(wq3 * q3 + wq2 * q2 + wq1 * q1 + wq0 * q0)
        k = _silu(wk3 * k3 + wk2 * k2 + wk1 * k1 + wk0 * k0)
        v = _silu(wv3 * v3 + wv2 * v2 + wv1 * v1 + wv0 * v0)
        q3, q2, q1 = q2, q1, q0
        k3, k2, k1 = k2, k1, k0
        v3, v2, v1 = v2, v1, v0
        q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * (K_DIM**-0.5)
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        arrived = a + bias
        g = rate * tl.where(arrived > 20.0, arrived, tl.log(1.0 + tl.exp(tl.minimum(arrived, 20.0))))
        state = state * tl.exp(g)
        u = tl.sigmoid(b) * (v - tl.sum(k[:, None] * state, 0))
        state = tl.fma(tl.broadcast_to(k[:, None], (K_DIM, V_DIM)), u[None, :], state)
        o = tl.sum(q[:, None] * state, 0)
        o *= tl.rsqrt(tl.sum(o * o) / V_DIM + eps) * weight * _silu(gate)
        tl.store(out + row * (V_HEADS * V_DIM) + head * V_DIM + dv, o.to(dtype))
        if SNAPSHOTS == 0:
            entry = at * log_columns + (first + i) % log_columns
            tl.store(log_k + (entry * K_HEADS + key_head) * K_DIM + dk, k, mask=dk < stored)
            tl.store(log_u + (entry * V_HEADS + head) * V_DIM + dv, u)
            tl.store(log_g + entry * V_HEADS + head, g)
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
        ValueError: more than 9 rows, a kernel over 4, or head dims that are no powers of two.
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
        ValueError: more than 9 rows, a kernel over 4, or head dims that are no powers of two.
    """
    _checked(weights, x, ring, slot)
    return _launch(weights, x, ring, states, log, slot, position, pending, 0, pdl)


def _checked(weights: DeltaWeights, x: Tensor, ring: Tensor, slot: Tensor) -> int:
    rows = x.shape[-2] // slot.shape[0]
    kernel = weights.conv.shape[1]
    if not 1 <= rows <= MAX_ROWS or kernel > MAX_KERNEL:
        raise ValueError(f"the fused delta step takes 1 to {MAX_ROWS} rows and a kernel up to {MAX_KERNEL}")
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
        ROWS=x.shape[-2] // batch,
        K_HEADS=w.k_heads,
        V_HEADS=w.v_heads,
        K_DIM=w.k_dim,
        V_DIM=w.v_dim,
        KERNEL=w.conv.shape[1],
        SNAPSHOTS=snapshots,
        SPLITS=splits_of(x),
        PDL=pdl,
        num_warps=8 if w.k_dim * w.v_dim >= 8192 else 4,
        launch_pdl=pdl,
    )
    return out
