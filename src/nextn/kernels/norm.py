"""Root-mean-square norms: plain, with the residual added first, and the gated one of the delta net.

Sums run in float32 for half-precision inputs and in the input's own precision otherwise. `one_plus` weights are
stored around zero and applied as 1 + w (Qwen3-Next, Qwen3.5, Step); plain ones as w.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

HALF = (torch.bfloat16, torch.float16)


def wide(x: Tensor) -> Tensor:
    """float32 for half precision, unchanged otherwise."""
    return x.float() if x.dtype in HALF else x


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / rms(x) * scale over the last dimension; `scale` is w or 1 + w in at least float32. Shape and dtype of x."""
    if x.dtype in HALF:
        return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], scale, eps)


def add_rms_norm(x: Tensor, residual: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and norm the sum.

    Args:
        x: [..., hidden], the last block's output.
        residual: same shape, or None at the start of the stream.
    Returns:
        (normed, new residual), both in x's dtype.
    """
    if residual is not None:
        x = x + residual
    return rms_norm(x, scale, eps), x


def gated_rms_norm(x: Tensor, gate: Tensor, scale: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate) over the last dimension (the delta net's output norm); dtype of gate."""
    return (wide(rms_norm(x, scale, eps).to(gate.dtype)) * F.silu(wide(gate))).to(gate.dtype)
