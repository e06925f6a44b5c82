"""Matrix products with few rows: on a CPU the weights' memory traffic is the cost, and BLAS needs choosing.

Measured with MKL on two cores (25,600 x 1,024 float32): `x @ W.T` streams weights at 10 GB/s with 2 to 8 rows,
because the library packs them for a large product; the same product written as `W @ x.T` with column-major x
streams them at 45 GB/s; one row goes through a single-threaded vector product at 16 to 21 GB/s, so it is done as two
equal rows. In a decode step weights come from memory, however small each is: with vector products a step of a 105
M-parameter model takes 1.8 times as long (`benchmarks/results/cpu-step.json`). Results agree to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FEW_ROWS = 8
SMALL_WEIGHT = 1 << 16
"""Elements below which one row is faster as one: there, the call itself is what takes time."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for x [..., in], weight [out, in]; returns [..., out]."""
    if x.device.type != "cpu" or weight.requires_grad or x.requires_grad or x.dtype == torch.bfloat16:
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    if rows > FEW_ROWS or (rows == 1 and weight.numel() < SMALL_WEIGHT):
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, x.shape[-1])
    if rows == 1:
        out = torch.mm(weight, flat.expand(2, -1).contiguous().t())[:, :1].t()
    else:
        out = torch.mm(weight, flat.contiguous().t()).t()
    out = out.contiguous() if bias is None else out + bias
    return out.view(*x.shape[:-1], weight.shape[0])
