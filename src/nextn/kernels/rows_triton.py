"""Triton kernels of `linear.linear` for a few rows, where streaming the weights is all that counts.

Two designs: up to four rows by multiply-add, and 16 or 32 rows a program on tensor cores, optionally split along K
into partial sums that the kernel reading them adds up. Both can start under dependent launch: weights never change, so
each program fetches its first tiles before it waits for the rows. `row_plans` says which design and sizes to use for a
shape. A product of gate and up rows can end in the activation, where a program has all the inputs of its outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.activation_triton import silu_mul
from nextn.kernels.row_plans import RowPlan

FMA_ROWS = 4
"""Rows that multiply-add takes at most."""


@triton.jit
def _multiply_add(
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_row: tl.tensor,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """BN outputs; with WHOLE, which more than one row or GATED needs, one tile holds all of their weights.

    With GATED w holds N gate rows, then N up rows.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = n[:, None] < N
    at = w + n[:, None].to(tl.int64) * K + k[None, :]
    tile = tl.load(at, mask=rows & (k[None, :] < K), other=0.0, eviction_policy="evict_first")
    up = tile
    if GATED:
        # Compiled for one output N is a plain number, which has no `to`.
        beside = w + (n[:, None] + N).to(tl.int64) * K + k[None, :]
        up = tl.load(beside, mask=rows & (k[None, :] < K), other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    if WHOLE:
        # All rows are loaded before a store that would hold their loads back.
        dtype: tl.constexpr = out.dtype.element_ty
        x0 = tl.load(x + k, mask=k < K, other=0.0)
        x1, x2, x3 = x0, x0, x0
        if ROWS > 1:
            x1 = tl.load(x + x_row + k, mask=k < K, other=0.0)
        if ROWS > 2:
            x2 = tl.load(x + 2 * x_row + k, mask=k < K, other=0.0)
        if ROWS > 3:
            x3 = tl.load(x + 3 * x_row + k, mask=k < K, other=0.0)
        tl.store(out + n, _total(tile, up, x0, GATED, dtype), mask=n < N)
        if ROWS > 1:
            tl.store(out + N + n, _total(tile, up, x1, GATED, dtype), mask=n < N)
        if ROWS > 2:
            tl.store(out + 2 * N + n, _total(tile, up, x2, GATED, dtype), mask=n < N)
        if ROWS > 3:
            tl.store(out + 3 * N + n, _total(tile, up, x3, GATED, dtype), mask=n < N)
    else:
        acc = tl.zeros((BN, BK), tl.float32)
        for start in range(0, K, BK):
            ahead = start + BK
            inside = rows & (k[None, :] + ahead < K)
            following = tl.load(at + ahead, mask=inside, other=0.0, eviction_policy="evict_first")
            if EVEN:
                value = tl.load(x + start + k)
            else:
                value = tl.load(x + start + k, mask=start + k < K, other=0.0)
            acc += tile.to(tl.float32) * value.to(tl.float32)[None, :]
            tile = following
        tl.store(out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _total(tile: tl.tensor, up: tl.tensor, x: tl.tensor, GATED: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """A row's outputs by whole rows of weights."""
    value = x.to(tl.float32)[None, :]
    total = tl.sum(tile.to(tl.float32) * value, 1)
    if GATED:
        total = _gated(total, tl.sum(up.to(tl.float32) * value, 1), dtype)
    return total.to(dtype)


@triton.jit
def _gated(gate: tl.tensor, up: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """silu(gate) * up, of values rounded as products of their own would store them."""
    gate = gate.to(dtype).to(tl.float32)
    return gate * tl.sigmoid(gate) * up.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_row: tl.tensor,
    rows: tl.tensor,
    chunk: tl.tensor,
    row_blocks: tl.tensor,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST: tl.constexpr,
    AHEAD: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Split s multiplies columns s * chunk .. of x and w into out[s, :rows, :], M rows a program.

    Blocks of rows that share weights are neighbours in the launch order, so that the L2 cache serves all but one.
    SWAP puts the weights on the side of the tensor core's wide dimension. Before the wait FIRST tiles of weights, 0 to
    2, are loaded, and AHEAD further ones asked into the L2 cache. With GATED, and one split, w holds N gate rows, then
    N up rows, and a program takes BN / 2 of either.
    """
    if PDL:
        gdc_launch_dependents()
    OUTPUTS: tl.constexpr = BN // 2 if GATED else BN
    first = tl.program_id(0) // row_blocks * OUTPUTS
    n = first + tl.arange(0, BN) % OUTPUTS
    m = tl.program_id(0) % row_blocks * M + tl.arange(0, M)
    k = tl.program_id(1) * chunk + tl.arange(0, BK)
    wanted = n[:, None] < N
    row_inside = m[:, None] < rows
    line = tl.minimum(n, N - 1).to(tl.int64) + tl.arange(0, BN) // OUTPUTS * N
    base = w + line[:, None] * K
    if FIRST > 0:
        early = tl.load(base + k[None, :], mask=wanted & (k[None, :] < K), other=0.0, eviction_policy="evict_first")
    if FIRST > 1:
        k1 = k[None, :] + BK
        early1 = tl.load(base + k1, mask=wanted & (k1 < K), other=0.0, eviction_policy="evict_first")
    if AHEAD > 0:
        # One request of the copy engine an output: all its AHEAD tiles, which lie side by side.
        row = w + line * K + tl.program_id(1) * chunk + FIRST * BK
        size = tl.full((BN,), AHEAD * BK * (w.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [row.to(tl.int64), size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    if PDL:
        gdc_wait()
    if SWAP:
        acc = tl.zeros((BN, M), tl.float32)
    else:
        acc = tl.zeros((M, BN), tl.float32)
    if FIRST > 0:
        # Multiplied last, so that the loads of the loop do not wait for them.
        x0 = tl.load(x + m[:, None] * x_row + k[None, :], mask=row_inside & (k[None, :] < K), other=0.0)
    if FIRST > 1:
        x1 = tl.load(x + m[:, None] * x_row + k1, mask=row_inside & (k1 < K), other=0.0)
    for start in tl.range(FIRST * BK, chunk, BK, num_stages=STAGES):
        if EVEN:
            a = tl.load(x + m[:, None] * x_row + k[None, :] + start, mask=row_inside, other=0.0)
            b = tl.load(base + k[None, :] + start, mask=wanted, other=0.0, eviction_policy="evict_first")
        else:
            inside = k[None, :] + start < K
            a = tl.load(x + m[:, None] * x_row + k[None, :] + start, mask=row_inside & inside, other=0.0)
            b = tl.load(base + k[None, :] + start, mask=wanted & inside, other=0.0, eviction_policy="evict_first")
        if SWAP:
            acc = tl.dot(b, a.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
    if FIRST > 0:
        if SWAP:
            acc = tl.dot(early, x0.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x0, early.T, acc, input_precision="ieee")
    if FIRST > 1:
        if SWAP:
            acc = tl.dot(early1, x1.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x1, early1.T, acc, input_precision="ieee")
    if GATED:
        if SWAP:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OUTPUTS, M)), (1, 2, 0)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (M, 2, OUTPUTS)), (0, 2, 1)))
        acc = _gated(gate, up, out.dtype.element_ty)
    n = first + tl.arange(0, OUTPUTS)
    if SWAP:
        to = tl.program_id(1) * rows * N + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(out + to, acc.to(out.dtype.element_ty), mask=(m[None, :] < rows) & (n[:, None] < N))
    else:
        to = tl.program_id(1) * rows * N + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(out + to, acc.to(out.dtype.element_ty), mask=row_inside & (n[None, :] < N))


def _gates(plan: RowPlan, k: int) -> bool:
    """Whether a program of the plan has all k inputs of a gate and of its up row."""
    alone = plan.kind != "library" and plan.splits == 1 and plan.block_n > 1
    return alone and (plan.kind != "fma" or k <= plan.block_k)


def gated_product(x: Tensor, weight: Tensor, plan: RowPlan, *, pdl: bool = False) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), rounded as `activation.silu_mul` of the stored product.

    One kernel where a program of the plan has all the inputs of its outputs, else a product and `silu_mul`.

    Args:
        x: [rows, K], as `row_product` takes it.
        weight: [2 * inter, K], contiguous: gate, then up.
    Returns:
        [rows, inter] in x's dtype.
    """
    if _gates(plan, x.shape[1]):
        return row_product(x, weight, plan, gated=True, pdl=pdl)
    product = row_product(x, weight, plan, pdl=pdl and plan.kind != "library")
    return silu_mul(product, dtype=x.dtype, pdl=pdl)


def row_product(
    x: Tensor, weight: Tensor, plan: RowPlan, *, out: Tensor | None = None, gated: bool = False, pdl: bool = False
) -> Tensor:
    """x @ weight.T without a bias.

    A `dot` or `swap` plan gives a row the same bits whatever rows stand beside it.

    Args:
        x: [rows, K], contiguous along K; an `fma` plan takes one row, or up to four where its block holds all of K.
        weight: [N, K], contiguous.
        out: where to put the result; partial sums are float32 [plan.splits, rows, N].
        gated: end in the activation, as `gated_product` asks of a plan that can.
    Returns:
        [rows, N] in x's dtype where the plan has one split, else partial sums; with `gated` [rows, N / 2].

    Raises:
        ValueError: rows or a layout that the plan's kernel does not take, or a plan that cannot end in the activation.
    """
    rows, k = x.shape
    if gated and not _gates(plan, k):
        raise ValueError(f"a program of {plan} does not have all {k} inputs of a gate and its up row")
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if plan.kind == "library":
        return F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)
    whole = k <= plan.block_k
    most = FMA_ROWS if whole else 1
    if (plan.kind == "fma" and rows > most) or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"a {plan.kind} product does not take {rows} rows, or a tensor is not contiguous along K")
    if out is None:
        shape = (rows, n) if plan.splits == 1 else (plan.splits, rows, n)
        out = torch.empty(shape, dtype=x.dtype if plan.splits == 1 else torch.float32, device=x.device)
    if plan.kind == "fma":
        block = plan.block_n // 2 if gated else plan.block_n
        _multiply_add[(triton.cdiv(n, block),)](
            x,
            weight,
            out,
            n,
            k,
            x.stride(0),
            ROWS=rows,
            BN=block,
            BK=plan.block_k,
            EVEN=k % plan.block_k == 0,
            WHOLE=whole,
            GATED=gated,
            PDL=pdl,
            num_warps=plan.warps,
            launch_pdl=pdl,
        )
        return out
    step = plan.splits * plan.block_k
    even = k % step == 0
    chunk = triton.cdiv(k, step) * plan.block_k
    row_blocks = triton.cdiv(rows, plan.block_m)
    outputs = plan.block_n // 2 if gated else plan.block_n
    _few_rows[(triton.cdiv(n, outputs) * row_blocks, plan.splits)](
        x,
        weight,
        out,
        n,
        k,
        x.stride(0),
        rows,
        chunk,
        row_blocks,
        M=plan.block_m,
        BN=plan.block_n,
        BK=plan.block_k,
        STAGES=plan.stages,
        FIRST=min(plan.first, chunk // plan.block_k),
        AHEAD=plan.ahead if pdl and even and (plan.first + plan.ahead) * step <= k else 0,
        SWAP=plan.kind == "swap",
        EVEN=even,
        GATED=gated,
        PDL=pdl,
        num_warps=plan.warps,
        launch_pdl=pdl,
    )
    return out
