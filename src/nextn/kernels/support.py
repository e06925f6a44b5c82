"""What the Triton kernels share: whether they can run, how inputs may arrive, and dependent launch.

Modules named ``*_triton`` import Triton when they are imported; ask `available` first. Each stands beside the plain
functions that define it and keeps their arithmetic: float32 inside, rounded where the plain function stores.

Inputs that a matrix product made may come as its **partial sums**: float32 [splits, rows, N] instead of [rows, N].
The kernel that reads them adds them up in order and rounds once to the model's dtype, as if the product had stored it.

**Dependent launch** (``pdl=True``, compute capability 9.0 and above): a kernel may start while the one before it on the
stream still runs; it waits before it touches anything that an earlier kernel of the chain wrote. What it reads before
that wait are weights, indices (positions, slots, pages) and caches of earlier rounds: the delta net's, and keys and
values that the caller calls settled. Whatever writes those must be an ordinary launch, or be followed by one or by the
end of a graph, before the chain begins.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


def available(device: torch.device) -> bool:
    """Whether the Triton kernels can run on a device: an NVIDIA GPU, with Triton installed."""
    return device.type == "cuda" and torch.version.hip is None and find_spec("triton") is not None


def splits_of(x: Tensor) -> int:
    """0 for [rows, N]; the number of partial sums for [splits, rows, N].

    Raises:
        ValueError: another rank, partial sums that are not float32, or columns that are not contiguous.
    """
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or (x.dim() == 3 and x.dtype != torch.float32):
        raise ValueError(
            f"expected [rows, N], or float32 [splits, rows, N], contiguous along N; got {x.shape} {x.dtype}"
        )
    return x.shape[0] if x.dim() == 3 else 0


def whole(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, N] in `dtype` from either form: the definition of what a kernel reads."""
    return x.sum(0).to(dtype) if splits_of(x) else x.to(dtype)
