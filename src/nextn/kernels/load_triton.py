"""Load what a matrix product left, stored values or partial sums."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from nextn.kernels.support import Num, Ptr


@triton.jit
def load_rows(x: Ptr, offset: Num, mask: Num, split_stride: Num, SPLITS: tl.constexpr, dtype: tl.constexpr) -> Any:
    """Values at `offset` as float32: stored ones for SPLITS = 0, else the partial sums' total rounded to `dtype`."""
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if SPLITS > 0:
        for s in tl.static_range(1, SPLITS):
            value += tl.load(x + s * split_stride + offset, mask=mask, other=0.0)
        value = value.to(dtype).to(tl.float32)
    return value
