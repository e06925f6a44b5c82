"""Load what a matrix product left, stored values or partial sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    x: tl.tensor, offset: tl.tensor, mask: tl.tensor, split_stride: tl.tensor, SPLITS: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """Values at `offset` as float32: stored ones for SPLITS = 0, else the partial sums' total rounded to `dtype`."""
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if SPLITS > 0:
        for s in tl.static_range(1, SPLITS):
            value += tl.load(x + s * split_stride + offset, mask=mask, other=0.0)
        value = value.to(dtype).to(tl.float32)
    return value
