"""The Triton kernels of `delta`: the recurrence, some columns of a value head's state a program; then norm and gate.

With dependent launch the state is loaded, and in replay also brought up to date and stored, while the input product
before it still runs; see `support` for what that asks of the caller.

How many columns a program takes, and how many warps it has, hangs on how many heads there are to share out: see
`program_of`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.delta import DeltaLog, DeltaWeights
from nextn.kernels.delta_conv_triton import convolved, known_inputs, row_inputs, silu
from nextn.kernels.load_triton import load_rows
from nextn.kernels.support import splits_of

MAX_KERNEL = 4
MAX_ROWS = 9
FEW = 32, 4
"""Columns and warps of a program where there are few heads, and whenever rows must round alike in any batch."""
FULL = 64
"""Columns from which on a program has no registers for the next row's vectors beside this one's."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _add_pairs(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return a + c, b + d


@triton.jit
def _vectors(
    line: tl.tensor, dk: tl.tensor, own: tl.tensor, K_DIM: tl.constexpr, BLOCK_V: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of a row in `scratch`: q, k, v, decay, write strength and q . k."""
    q, k = tl.load(line + dk), tl.load(line + K_DIM + dk)
    scalars = line + 2 * K_DIM + BLOCK_V
    return q, k, tl.load(line + 2 * K_DIM + own), tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)


@triton.jit
def _delta(
    x: tl.tensor,
    conv: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    ring: tl.tensor,
    states: tl.tensor,
    log_k: tl.tensor,
    log_u: tl.tensor,
    log_g: tl.tensor,
    slot: tl.tensor,
    position: tl.tensor,
    select: tl.tensor,
    scratch: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    x_split: tl.tensor,
    ring_columns: tl.tensor,
    log_columns: tl.tensor,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KERNEL: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    dtype: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """SNAPSHOTS is how many a slot has, or 0 for replay; EARLY whether a row's vectors are loaded a row ahead.

    Loads come in three groups, with EARLY each before any store that would hold them back: what earlier rounds left,
    the input product, and the rows' vectors, which go through `scratch` from the layout that convolves all rows at once
    to the one that the state needs.
    """
    if PDL:
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = V_DIM // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    batch = tl.program_id(1)
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    WIDTH: tl.constexpr = 2 * K_DIM + BLOCK_V + 4
    key_head = head // GROUP
    dk = tl.arange(0, K_DIM)
    dv = block * BLOCK_V + tl.arange(0, BLOCK_V)
    own = tl.arange(0, BLOCK_V)
    row = tl.arange(0, PADDED)[:, None]
    tile = dk[:, None] * V_DIM + dv[None, :]
    cq = key_head * K_DIM + dk[None, :]
    ck = cq + K_HEADS * K_DIM
    cv = 2 * K_HEADS * K_DIM + head * V_DIM + dv[None, :]
    at = tl.load(slot + batch).to(tl.int64)
    first = tl.load(position + batch).to(tl.int32)
    chosen = tl.load(select + batch).to(tl.int32)

    if SNAPSHOTS == 0:
        start = states + (at * V_HEADS + head) * (K_DIM * V_DIM) + tile
    else:
        start = states + ((at * SNAPSHOTS + chosen) * V_HEADS + head) * (K_DIM * V_DIM) + tile
    state = tl.load(start)
    window = ring + at * ring_columns * CHANNELS
    q_known = known_inputs(window, conv, row, cq, first, ring_columns, CHANNELS, KERNEL)
    k_known = known_inputs(window, conv, row, ck, first, ring_columns, CHANNELS, KERNEL)
    v_known = known_inputs(window, conv, row, cv, first, ring_columns, CHANNELS, KERNEL)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    if SNAPSHOTS == 0:
        for i in range(chosen):
            column = at * log_columns + (first - chosen + i + log_columns) % log_columns
            key = tl.load(log_k + (column * K_HEADS + key_head) * K_DIM + dk)
            update = tl.load(log_u + (column * V_HEADS + head) * V_DIM + dv)
            decayed = state * tl.exp(tl.load(log_g + column * V_HEADS + head))
            state = tl.fma(tl.broadcast_to(key[:, None], (K_DIM, BLOCK_V)), update[None, :], decayed)
        tl.store(start, state)

    if PDL:
        gdc_wait()
    lines = x + batch * ROWS * x_row
    heads = CHANNELS + V_HEADS * V_DIM
    q0 = row_inputs(lines, row, cq, x_row, x_split, ROWS, SPLITS, 0, dtype)
    k0 = row_inputs(lines, row, ck, x_row, x_split, ROWS, SPLITS, 0, dtype)
    v0 = row_inputs(lines, row, cv, x_row, x_split, ROWS, SPLITS, 0, dtype)
    b = load_rows(lines, row * x_row + heads + head, row < ROWS, x_split, SPLITS, dtype)
    a = load_rows(lines, row * x_row + heads + V_HEADS + head, row < ROWS, x_split, SPLITS, dtype) + bias
    q = convolved(q_known, q0, lines, row, cq, x_row, x_split, ROWS, SPLITS, dtype)
    k = convolved(k_known, k0, lines, row, ck, x_row, x_split, ROWS, SPLITS, dtype)
    v = convolved(v_known, v0, lines, row, cv, x_row, x_split, ROWS, SPLITS, dtype)
    q *= tl.rsqrt(tl.sum(q * q, 1)[:, None] + 1e-6) * (K_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 1)[:, None] + 1e-6)
    qk = tl.sum(q * k, 1)[:, None]
    g = rate * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))

    mine = scratch + (batch * tl.num_programs(0) + tl.program_id(0)) * (ROWS * WIDTH)
    line = mine + row * WIDTH
    real = row < ROWS
    tl.store(line + dk[None, :], q, mask=real & (cq >= 0))
    tl.store(line + K_DIM + dk[None, :], k, mask=real & (cq >= 0))
    tl.store(line + 2 * K_DIM + own[None, :], v, mask=real & (cv >= 0))
    tl.store(line + 2 * K_DIM + BLOCK_V, tl.exp(g), mask=real)
    tl.store(line + 2 * K_DIM + BLOCK_V + 1, tl.sigmoid(b), mask=real)
    tl.store(line + 2 * K_DIM + BLOCK_V + 2, qk, mask=real)
    tl.debug_barrier()
    qi, ki, vi, decay, beta, dot = _vectors(mine, dk, own, K_DIM, BLOCK_V)
    for i in tl.range(0, ROWS, num_stages=1):
        if EARLY:
            # Of the next row, before this row's stores, which would hold the loads back.
            following = mine + tl.minimum(i + 1, ROWS - 1) * WIDTH
            q_next, k_next, v_next, decay_next, beta_next, dot_next = _vectors(following, dk, own, K_DIM, BLOCK_V)
        state = state * decay
        recalled, read = tl.reduce((ki[:, None] * state, qi[:, None] * state), 0, _add_pairs)
        u = beta * (vi - recalled)
        o = read + dot * u
        state = tl.fma(tl.broadcast_to(ki[:, None], (K_DIM, BLOCK_V)), u[None, :], state)
        tl.store(out + (batch * ROWS + i) * (V_HEADS * V_DIM) + head * V_DIM + dv, o)
        if SNAPSHOTS == 0:
            logged = at * log_columns + (first + i) % log_columns
            tl.store(log_u + (logged * V_HEADS + head) * V_DIM + dv, u)
        else:
            tl.store(states + ((at * SNAPSHOTS + i) * V_HEADS + head) * (K_DIM * V_DIM) + tile, state)
        if EARLY:
            qi, ki, vi, decay, beta, dot = q_next, k_next, v_next, decay_next, beta_next, dot_next
        else:
            following = mine + tl.minimum(i + 1, ROWS - 1) * WIDTH
            qi, ki, vi, decay, beta, dot = _vectors(following, dk, own, K_DIM, BLOCK_V)

    # All programs of the value heads that share a key head convolve its channels; one of them stores.
    stored = tl.where((head % GROUP == 0) & (block == 0), CHANNELS, 0)
    newest = window + (first + row) % ring_columns * CHANNELS
    tl.store(newest + cq, q0.to(dtype), mask=real & (cq < stored))
    tl.store(newest + ck, k0.to(dtype), mask=real & (ck < stored))
    tl.store(newest + cv, v0.to(dtype), mask=real & (cv >= 0))
    if SNAPSHOTS == 0:
        entry = at * log_columns + (first + row) % log_columns
        tl.store(log_k + (entry * K_HEADS + key_head) * K_DIM + dk[None, :], k, mask=real & (ck < stored))
        tl.store(log_g + entry * V_HEADS + head, g, mask=real)


@triton.jit
def _norm_gate(
    o: tl.tensor,
    x: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    x_split: tl.tensor,
    gate_column: tl.tensor,
    eps: tl.tensor,
    V_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """rms_norm(o) * silu(gate) of one row and head; the gate lies in the input product."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    dv = tl.arange(0, V_DIM)
    weight = tl.load(scale + dv).to(tl.float32)
    if PDL:
        gdc_wait()
    at = row * (V_HEADS * V_DIM) + head * V_DIM + dv
    value = tl.load(o + at).to(tl.float32)
    gate_at = row * x_row + gate_column + head * V_DIM + dv
    gate = load_rows(x, gate_at, dv < V_DIM, x_split, SPLITS, out.dtype.element_ty)
    value *= tl.rsqrt(tl.sum(value * value) / V_DIM + eps) * weight * silu(gate)
    tl.store(out + at, value.to(out.dtype.element_ty))


def delta_snapshots(
    weights: DeltaWeights,
    x: Tensor,
    ring: Tensor,
    states: Tensor,
    slot: Tensor,
    position: Tensor,
    select: Tensor,
    *,
    pad_rows: int = 1,
    pdl: bool = False,
) -> Tensor:
    """`delta.delta_snapshots`; states are float32.

    With the same `pad_rows` above 1, rows give the same bits in steps of any number of rows up to it, in any batch.

    Raises:
        ValueError: more than 9 rows, a kernel over 4, or head dims that are no powers of two.
    """
    rows = _checked(weights, x, ring, slot)
    if states.shape[1] < rows:
        raise ValueError(f"{rows} rows need as many snapshots; there are {states.shape[1]}")
    log = DeltaLog(states, states, states)
    return _launch(weights, x, ring, states, log, slot, position, select, states.shape[1], pad_rows, pdl)


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
    pad_rows: int = 1,
    pdl: bool = False,
) -> Tensor:
    """`delta.delta_replay`; states and log are float32, pending + rows of no sequence exceed the log's columns.

    `pad_rows` as in `delta_snapshots`.

    Raises:
        ValueError: more than 9 rows, a kernel over 4, or head dims that are no powers of two.
    """
    _checked(weights, x, ring, slot)
    return _launch(weights, x, ring, states, log, slot, position, pending, 0, pad_rows, pdl)


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


def program_of(batch: int, v_heads: int) -> tuple[int, int]:
    """Columns of a head's state and warps of a program, by the value heads of all sequences together.

    Few heads are spread over the card. Many fill it by themselves: then fewer warps, each with more of the state, meet
    less often to sum over the key dimension. Measured on an H200 inside whole forwards (``delta-programs-h200.json``
    under benchmarks/results). A batch counts as the next power of two, so that padded sequences change nothing.
    """
    heads = triton.next_power_of_2(batch) * v_heads
    return FEW if heads < 32 else (32, 2) if heads < 256 else (64, 2)


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
    pad_rows: int,
    pdl: bool,
) -> Tensor:
    w = weights
    batch = slot.shape[0]
    total = x.shape[-2]
    rows, splits = total // batch, splits_of(x)
    columns, warps = FEW if pad_rows > 1 else program_of(batch, w.v_heads)
    block = min(columns, w.v_dim)
    programs = w.v_heads * (w.v_dim // block)
    width = 2 * w.k_dim + block + 4
    scratch = torch.empty(batch * programs * rows * width, dtype=torch.float32, device=x.device)
    raw = torch.empty(total, w.v_heads * w.v_dim, dtype=torch.float32, device=x.device)
    _delta[(programs, batch)](
        x,
        w.conv,
        w.a_log,
        w.dt_bias,
        ring,
        states,
        log.k,
        log.u,
        log.g,
        slot,
        position,
        select,
        scratch,
        raw,
        x.stride(-2),
        x.stride(0),
        ring.shape[1],
        log.k.shape[1],
        ROWS=rows,
        PADDED=triton.next_power_of_2(max(rows, pad_rows)),
        K_HEADS=w.k_heads,
        V_HEADS=w.v_heads,
        K_DIM=w.k_dim,
        V_DIM=w.v_dim,
        BLOCK_V=block,
        KERNEL=w.conv.shape[1],
        SNAPSHOTS=snapshots,
        SPLITS=splits,
        dtype=DTYPES[ring.dtype],
        EARLY=block < FULL,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return norm_gate(w, raw, x, dtype=ring.dtype, pdl=pdl)


def norm_gate(weights: DeltaWeights, raw: Tensor, x: Tensor, *, dtype: torch.dtype, pdl: bool = False) -> Tensor:
    """`norm.gated_rms_norm` of rows whose gates lie in the input product.

    Args:
        raw: [rows, v_heads * v_dim], contiguous.
        x: the input product [rows, N], or its partial sums.
    Returns:
        [rows, v_heads * v_dim] in `dtype`.
    """
    w = weights
    out = torch.empty(raw.shape, dtype=dtype, device=x.device)
    _norm_gate[(raw.shape[0], w.v_heads)](
        raw,
        x,
        w.scale,
        out,
        x.stride(-2),
        x.stride(0),
        w.conv.shape[0],
        w.eps,
        V_HEADS=w.v_heads,
        V_DIM=w.v_dim,
        SPLITS=splits_of(x),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return out
