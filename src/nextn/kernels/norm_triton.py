"""The Triton kernels of `norm.add_rms_norm` and of two `norm.rms_norm` at once: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.load_triton import load_rows
from nextn.kernels.support import splits_of


@triton.jit
def _add_rms_norm(
    x: tl.tensor,
    ids: tl.tensor,
    residual: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    stream: tl.tensor,
    x_row: tl.tensor,
    x_split: tl.tensor,
    residual_row: tl.tensor,
    out_row: tl.tensor,
    stream_row: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PICK: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    weight = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    dtype = out.dtype.element_ty
    source = row.to(tl.int64)
    if PICK:
        source = tl.load(ids + row)
    value = load_rows(x, source * x_row + at, inside, x_split, SPLITS, dtype)
    if ADD:
        value += tl.load(residual + row * residual_row + at, mask=inside, other=0.0).to(tl.float32)
    stored = value.to(dtype)
    if KEEP:
        tl.store(stream + row * stream_row + at, stored, mask=inside)
    value = stored.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / HIDDEN + eps)
    tl.store(out + row * out_row + at, (value * weight).to(dtype), mask=inside)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    stream: Tensor | None = None,
    dtype: torch.dtype | None = None,
    ids: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and norm the sum.

    Args:
        x: [rows, hidden], or partial sums [splits, rows, hidden].
        residual: [rows, hidden], or None.
        scale: [hidden], w or 1 + w.
        out: [rows, hidden] for the normed rows; may be columns of a wider tensor.
        stream: [rows, hidden] for the sum; may be `residual` itself.
        dtype: of what is returned; default the residual's, else x's.
        ids: [rows] int64, contiguous: the rows of a stored x to take, as of an embedding.
    Returns:
        (normed, new residual). With a stored x, no residual and no ids the second is x itself.
    """
    splits = splits_of(x)
    rows, hidden = x.shape[-2:]
    if ids is not None:
        rows = ids.shape[0]
    if dtype is None:
        dtype = out.dtype if out is not None else residual.dtype if residual is not None else x.dtype
    if out is None:
        out = torch.empty(rows, hidden, dtype=dtype, device=x.device)
    keep = residual is not None or splits > 0 or ids is not None
    if not keep:
        stream = x
    elif stream is None:
        stream = torch.empty(rows, hidden, dtype=dtype, device=x.device)
    add = x if residual is None else residual
    block = triton.next_power_of_2(hidden)
    _add_rms_norm[(rows,)](
        x,
        ids if ids is not None else x,
        add,
        scale,
        out,
        stream,
        x.stride(-2),
        x.stride(0),
        add.stride(-2),
        out.stride(0),
        stream.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        SPLITS=splits,
        PICK=ids is not None,
        ADD=residual is not None,
        KEEP=keep,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
    return out, stream


@triton.jit
def _rms_norm_pair(
    table: tl.tensor,
    ids: tl.tensor,
    x: tl.tensor,
    table_scale: tl.tensor,
    x_scale: tl.tensor,
    table_out: tl.tensor,
    x_out: tl.tensor,
    table_row: tl.tensor,
    x_row: tl.tensor,
    out_row: tl.tensor,
    table_eps: tl.tensor,
    x_eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A row of the table, or of x."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    picks = tl.program_id(1) == 0
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    weight = tl.load((table_scale if picks else x_scale) + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if picks:
        source = table + tl.load(ids + row) * table_row
    else:
        source = x + row.to(tl.int64) * x_row
    value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / HIDDEN + (table_eps if picks else x_eps))
    out = table_out if picks else x_out
    tl.store(out + row * out_row + at, (value * weight).to(out.dtype.element_ty), mask=inside)


def rms_norm_pair(
    table: Tensor,
    ids: Tensor,
    table_scale: Tensor,
    table_eps: float,
    x: Tensor,
    x_scale: Tensor,
    x_eps: float,
    *,
    out: tuple[Tensor, Tensor],
    pdl: bool = False,
) -> None:
    """`norm.rms_norm` of an embedding's rows `ids` [rows] into out[0] and of x [rows, hidden] into out[1], at once.

    Args:
        table, x: of one dtype, rows contiguous.
        out: [rows, hidden] each; columns of one wider tensor.
    """
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _rms_norm_pair[(rows, 2)](
        table,
        ids,
        x,
        table_scale,
        x_scale,
        *out,
        table.stride(0),
        x.stride(0),
        out[0].stride(0),
        table_eps,
        x_eps,
        HIDDEN=hidden,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
