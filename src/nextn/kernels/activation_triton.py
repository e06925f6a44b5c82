"""The Triton kernels of `activation`: gated activations of stored values or partial sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.load_triton import load_rows
from nextn.kernels.support import splits_of


@triton.jit
def _silu_mul(
    x: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    x_split: tl.tensor,
    inter: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inter
    if PDL:
        gdc_wait()
    dtype = out.dtype.element_ty
    gate = load_rows(x, row * x_row + at, inside, x_split, SPLITS, dtype)
    up = load_rows(x, row * x_row + inter + at, inside, x_split, SPLITS, dtype)
    tl.store(out + row * inter + at, (gate * tl.sigmoid(gate) * up).to(dtype), mask=inside)


@triton.jit
def _sigmoid_mul(
    x: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    x_split: tl.tensor,
    gate_row: tl.tensor,
    gate_split: tl.tensor,
    gate_head: tl.tensor,
    width: tl.tensor,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    GATE_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if PDL:
        gdc_wait()
    dtype = out.dtype.element_ty
    value = load_rows(x, row * x_row + at, inside, x_split, SPLITS, dtype)
    gate_at = row * gate_row + at // DIM * gate_head + at % DIM
    open_ = tl.sigmoid(load_rows(gate, gate_at, inside, gate_split, GATE_SPLITS, dtype))
    tl.store(out + row * width + at, (value * open_).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor, *, dtype: torch.dtype | None = None, pdl: bool = False) -> Tensor:
    """silu(gate) * up for gate_up [rows, 2 * inter], or its partial sums; returns [rows, inter] in `dtype`."""
    splits = splits_of(gate_up)
    rows, inter = gate_up.shape[-2], gate_up.shape[-1] // 2
    out = torch.empty(rows, inter, dtype=dtype or gate_up.dtype, device=gate_up.device)
    block = 1024 if rows > 16 else 256
    _silu_mul[(rows, triton.cdiv(inter, block))](
        gate_up,
        out,
        gate_up.stride(-2),
        gate_up.stride(0),
        inter,
        SPLITS=splits,
        BLOCK=block,
        PDL=pdl,
        num_warps=block // 128,
        launch_pdl=pdl,
    )
    return out


def sigmoid_mul(
    x: Tensor, gate: Tensor, head_dim: int, *, dtype: torch.dtype | None = None, pdl: bool = False
) -> Tensor:
    """x * sigmoid(gate).

    Args:
        x: [rows, heads * head_dim], or partial sums.
        gate: columns of the product that made it: [rows, N] or its partial sums [splits, rows, N], where head h's
            gate is columns h * 2 * head_dim .. h * 2 * head_dim + head_dim (the layout [query, gate] of each head,
            with the view starting at the first gate).
    Returns:
        [rows, heads * head_dim] in `dtype`, by default x's.
    """
    splits, gate_splits = splits_of(x), splits_of(gate)
    rows, width = x.shape[-2:]
    out = torch.empty(rows, width, dtype=dtype or x.dtype, device=x.device)
    block = 256
    _sigmoid_mul[(rows, triton.cdiv(width, block))](
        x,
        gate,
        out,
        x.stride(-2),
        x.stride(0),
        gate.stride(-2),
        gate.stride(0),
        2 * head_dim,
        width,
        DIM=head_dim,
        SPLITS=splits,
        GATE_SPLITS=gate_splits,
        BLOCK=block,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
    return out
