"""The Triton kernel of `rope.qk_norm_rope` and `attention.write_kv`: one program a row and head.

It reads the merged q, k, v product, norms and rotates the heads of q and k, and puts k and v into their pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.load_triton import load_rows
from nextn.kernels.support import splits_of


@triton.jit
def _qkv(
    x: tl.tensor,
    bias: tl.tensor,
    q_scale: tl.tensor,
    k_scale: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    q_out: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    x_row: tl.tensor,
    x_split: tl.tensor,
    table_row: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    Q_STEP: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Q_STEP: columns from one query head to the next; HALF: half of the channels that rotate."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    is_q = head < HEADS
    is_v = head >= HEADS + KV_HEADS
    kv_head = (head - HEADS) % KV_HEADS
    column = tl.where(is_q, head * Q_STEP, HEADS * Q_STEP + (head - HEADS) * DIM)
    # The other half of the pair that rotates; a channel that does not rotate is its own.
    other = tl.where(at < HALF, at + HALF, tl.where(at < 2 * HALF, at - HALF, at))
    position = tl.load(positions + row)
    page = tl.load(table + row // rows * table_row + position // PAGE).to(tl.int64)
    angle = position.to(tl.int64) * HALF + at % HALF
    c = tl.load(cos + angle, mask=at < 2 * HALF, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=at < 2 * HALF, other=0.0).to(tl.float32)
    if NORM:
        scale = q_scale if is_q else k_scale
        weight = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
        pair_weight = tl.load(scale + other, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    dtype = q_out.dtype.element_ty
    value = load_rows(x, row * x_row + column + at, inside, x_split, SPLITS, dtype)
    pair = load_rows(x, row * x_row + column + other, inside, x_split, SPLITS, dtype)
    if BIAS:
        value = (value + tl.load(bias + column + at, mask=inside, other=0.0)).to(dtype).to(tl.float32)
        pair = (pair + tl.load(bias + column + other, mask=inside, other=0.0)).to(dtype).to(tl.float32)
    if is_v:
        result = value
    else:
        if NORM:
            inverse = tl.rsqrt(tl.sum(value * value) / DIM + eps)
            value = (value * inverse * weight).to(dtype).to(tl.float32)
            pair = (pair * inverse * pair_weight).to(dtype).to(tl.float32)
        result = value * c + tl.where(at < HALF, -pair, pair) * s
    if is_q:
        tl.store(q_out + (row * HEADS + head) * DIM + at, result.to(dtype), mask=inside)
    else:
        where = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM + at
        if is_v:
            tl.store(v_pool + where, result.to(v_pool.dtype.element_ty), mask=inside)
        else:
            tl.store(k_pool + where, result.to(k_pool.dtype.element_ty), mask=inside)


def qkv_to_pages(
    x: Tensor,
    heads: int,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    table: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    q_step: int | None = None,
    bias: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Norm and rotate q and k, store k and v.

    Args:
        x: the merged product [batch * rows, heads * q_step + 2 * kv_heads * head_dim], or its partial sums.
        q_scale, k_scale: [head_dim] float32 scales of the head norms, or None.
        cos, sin: [positions, rotary_dim / 2], of every position that may come.
        positions: [batch, rows], contiguous.
        table: [batch, n] page ids.
        k_pool, v_pool: [pages, page_size, kv_heads, head_dim], contiguous.
        q_step: columns from one query head to the next: 2 * head_dim where a gate follows each head's query.
        bias: of the product, added here because partial sums have none.
    Returns:
        q [batch * rows, heads, head_dim] in the pools' dtype.
    """
    batch, rows = positions.shape
    page, kv_heads, dim = k_pool.shape[1:]
    half = cos.shape[1]
    q = torch.empty(batch * rows, heads, dim, dtype=k_pool.dtype, device=x.device)
    block = triton.next_power_of_2(dim)
    _qkv[(batch * rows, heads + 2 * kv_heads)](
        x,
        bias if bias is not None else x,
        q_scale if q_scale is not None else x,
        k_scale if k_scale is not None else x,
        cos,
        sin,
        positions,
        table,
        q,
        k_pool,
        v_pool,
        x.stride(-2),
        x.stride(0),
        table.stride(0),
        rows,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK=block,
        HALF=half,
        Q_STEP=q_step or dim,
        PAGE=page,
        NORM=q_scale is not None,
        BIAS=bias is not None,
        SPLITS=splits_of(x),
        PDL=pdl,
        num_warps=max(block // 128, 1),
        launch_pdl=pdl,
    )
    return q
