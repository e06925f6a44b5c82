"""The fused norm against `norm.add_rms_norm`, from stored values and from partial sums."""

from __future__ import annotations

import pytest
import torch

from nextn.kernels import norm
from tests.kernels.cases import DTYPES, close, partials, poison, randn, real

pytest.importorskip("triton")
from nextn.kernels import norm_triton


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize(
    "rows,hidden,splits,with_residual",
    [(1, 64, 0, True), (3, 96, 0, False), (2, 96, 3, True), (2, 64, 1, False), real(512, 4096, 0, True),
     real(4, 2560, 4, True), real(9, 5120, 2, False)],
)  # fmt: skip
def test_equals_the_plain_norm(
    dtype: torch.dtype, one_plus: bool, rows: int, hidden: int, splits: int, with_residual: bool
) -> None:
    x = randn(rows, hidden, dtype=dtype)
    residual = randn(rows, hidden, dtype=dtype, seed=1) if with_residual else None
    weight = randn(hidden, seed=2) * 0.1
    scale = 1 + weight if one_plus else weight
    arrived = partials(x, splits)
    out = poison(rows + 2, hidden, dtype=dtype)
    stream = poison(rows + 2, hidden, dtype=dtype)
    given = norm_triton.add_rms_norm(arrived, residual, scale, 1e-6, out=out[1:-1], stream=stream[1:-1], dtype=dtype)
    x = arrived.sum(0).to(dtype) if splits else x
    expected = norm.add_rms_norm(x, residual, scale, 1e-6)
    assert close(given[0], expected[0])
    assert close(given[1], expected[1])
    assert torch.equal(out[1:-1], given[0])
    assert out[[0, -1]].isnan().all()
    assert stream[[0, -1]].isnan().all()


def test_the_stream_may_be_updated_in_place() -> None:
    x, residual, scale = randn(2, 64), randn(2, 64, seed=1), randn(64, seed=2)
    expected = norm.add_rms_norm(x, residual, scale, 1e-5)
    normed, stream = norm_triton.add_rms_norm(x, residual, scale, 1e-5, stream=residual)
    assert stream is residual
    assert close(normed, expected[0])
    assert torch.equal(residual, expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,hidden", [(3, 64), (1, 96), real(4, 2560)])
@pytest.mark.parametrize("first", [0, 1])
def test_two_norms_fill_one_wide_tensor(dtype: torch.dtype, rows: int, hidden: int, first: int) -> None:
    table, x = randn(9, hidden, dtype=dtype), randn(rows, 2 * hidden, dtype=dtype, seed=1)[:, :hidden]
    ids = torch.tensor([8, 0, 3, 3], device=table.device)[:rows]
    scales = [1 + 0.1 * randn(hidden, seed=s) for s in (2, 3)]
    wide = poison(rows + 2, 2 * hidden, dtype=dtype)
    halves = wide[1:-1, :hidden], wide[1:-1, hidden:]
    out = halves[first], halves[1 - first]
    norm_triton.rms_norm_pair(table, ids, scales[0], 1e-6, x, scales[1], 1e-5, out=out)
    assert close(out[0], norm.rms_norm(table[ids], scales[0], 1e-6))
    assert close(out[1], norm.rms_norm(x, scales[1], 1e-5))
    assert wide[[0, -1]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_an_embedding_are_picked_by_id(dtype: torch.dtype) -> None:
    table, scale = randn(9, 96, dtype=dtype), randn(96, seed=2)
    ids = torch.tensor([8, 0, 3, 3], device=table.device)
    normed, stream = norm_triton.add_rms_norm(table, None, scale, 1e-6, ids=ids)
    assert torch.equal(stream, table[ids])
    assert close(normed, norm.rms_norm(table[ids], scale, 1e-6))
