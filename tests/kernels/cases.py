"""What the kernel tests share: devices and dtypes to run on, random inputs, partial sums, guard rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3}

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def real(*values: object) -> object:
    """Parameters at a real model's size: only with a GPU, the interpreter would take minutes."""
    return pytest.param(*values, marks=on_gpu)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def partials(x: Tensor, splits: int) -> Tensor:
    """float32 [splits, rows, N] whose total is x to rounding, or x itself for 0; unequal random shares."""
    if splits == 0:
        return x
    share = torch.rand(splits, *x.shape, device=x.device) + 0.1
    return share / share.sum(0) * x.float()


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| over all elements; NaN never passes a comparison with it."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


def close(got: Tensor, expected: Tensor, factor: float = 1.0) -> bool:
    """Whether two results differ by no more than the rounding of `got`'s dtype."""
    return got.shape == expected.shape and error(got, expected) < TOLERANCE[got.dtype] * factor
