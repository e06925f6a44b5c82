"""The fused gated activations against the plain ones, from stored values and from partial sums."""

from __future__ import annotations

import pytest
import torch

from nextn.kernels import activation
from tests.kernels.cases import DTYPES, close, partials, randn, real

pytest.importorskip("triton")
from nextn.kernels import activation_triton


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,inter,splits", [(1, 96, 0), (3, 40, 2), (17, 300, 0), real(4, 9216, 2), real(128, 12288, 0)]
)
def test_silu_mul(dtype: torch.dtype, rows: int, inter: int, splits: int) -> None:
    arrived = partials(randn(rows, 2 * inter, dtype=dtype), splits)
    out = activation_triton.silu_mul(arrived, dtype=dtype)
    x = arrived.sum(0).to(dtype) if splits else arrived
    assert out.dtype == dtype
    assert close(out, activation.silu_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,heads,dim,splits,gate_splits", [(1, 2, 16, 0, 0), (3, 3, 32, 2, 2), (2, 4, 64, 0, 3), real(36, 16, 256, 0, 4)]
)
def test_sigmoid_mul_reads_the_gate_inside_the_query_product(
    dtype: torch.dtype, rows: int, heads: int, dim: int, splits: int, gate_splits: int
) -> None:
    x = partials(randn(rows, heads * dim, dtype=dtype), splits)
    product = partials(randn(rows, heads * dim * 2 + 24, dtype=dtype, seed=1), gate_splits)
    out = activation_triton.sigmoid_mul(x, product[..., dim:], dim, dtype=dtype)
    stored = product.sum(0).to(dtype) if gate_splits else product
    gate = stored[:, : heads * dim * 2].view(rows, heads, 2 * dim)[..., dim:].reshape(rows, -1)
    plain = x.sum(0).to(dtype) if splits else x
    assert close(out, activation.sigmoid_mul(plain, gate))
