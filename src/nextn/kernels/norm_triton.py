"""The Triton kernel of `norm.add_rms_norm` and `norm.rms_norm`: one program a row."""

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


def rms_norm(
    x: Tensor,
    scale: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    ids: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x / rms(x) * scale for stored x [rows, hidden]; `out` may be columns of a wider tensor; ids as above."""
    return add_rms_norm(x, None, scale, eps, out=out, ids=ids, pdl=pdl)[0]
