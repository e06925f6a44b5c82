"""Row products against float64 ones, the sums of their splits, and the table that chooses between them."""

from __future__ import annotations

import pytest
import torch

from nextn.kernels import activation, norm
from nextn.kernels.row_plans import LIBRARY, RowPlan, RowPlans
from tests.kernels.cases import DTYPES, TOLERANCE, error, poison, randn, real

pytest.importorskip("triton")
from nextn.kernels import rows_triton

FMA = RowPlan("fma", 8, 64)
DOT = RowPlan("dot", 32, 64, splits=2, stages=2)
SWAP = RowPlan("swap", 64, 64, splits=2, stages=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,n,k,plan",
    [(1, 40, 192, FMA), (1, 7, 100, FMA), (1, 70, 256, DOT), (4, 70, 256, DOT), (16, 32, 200, DOT), (3, 100, 320, SWAP),
     (9, 33, 64, RowPlan("dot", 32, 64, splits=1)), (5, 64, 72, RowPlan("swap", 64, 64, splits=1)),
     (4, 12, 40, LIBRARY),
     real(1, 12352, 2560, RowPlan("fma", 4, 1024, warps=4)),
     real(4, 2560, 9216, RowPlan("dot", 64, 128, splits=8, stages=4, ahead=2)),
     real(9, 18432, 2560, RowPlan("swap", 64, 128, splits=2, stages=4, ahead=2)),
     real(4, 248320, 1024, RowPlan("dot", 64, 128, splits=1, stages=4)),
     real(16, 2560, 9216, RowPlan("swap", 64, 128, splits=5, stages=4))],
)  # fmt: skip
def test_products(rows: int, n: int, k: int, plan: RowPlan, dtype: torch.dtype) -> None:
    x = randn(rows, k + 8, dtype=dtype)[:, :k]
    if plan.kind == "library":
        x = x.contiguous()
    weight = randn(n, k, dtype=dtype, seed=1)
    if plan.splits == 1:
        around = poison(rows + 2, n, dtype=dtype)
        got = rows_triton.row_product(x, weight, plan, out=around[1:-1])
        assert around[[0, -1]].isnan().all()
    else:
        around = poison(plan.splits + 2, rows, n)
        parts = rows_triton.row_product(x, weight, plan, out=around[1:-1])
        assert around[[0, -1]].isnan().all()
        got = parts.sum(0)
    # In double precision on the GPU the largest of these would take its memory: compare by blocks of outputs.
    for at in range(0, n, 32768):
        expected = x.double() @ weight[at : at + 32768].double().t()
        assert error(got[:, at : at + 32768], expected) < TOLERANCE[got.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "gated,normed,added", [(True, False, False), (False, True, False), (True, True, False), (False, False, True)]
)
@pytest.mark.parametrize(
    "rows,n,k,plan",
    [(1, 21, 100, FMA), (4, 40, 128, RowPlan("dot", 32, 64)), (3, 70, 72, RowPlan("swap", 64, 64)),
     real(1, 9216, 2560, RowPlan("fma", 4, 512)), real(4, 9216, 2560, RowPlan("swap", 64, 128, stages=3, ahead=2)),
     real(16, 12288, 4096, RowPlan("dot", 32, 128, stages=4))],
)  # fmt: skip
def test_norm_gate_and_stream_inside_a_product(
    rows: int, n: int, k: int, plan: RowPlan, gated: bool, normed: bool, added: bool, dtype: torch.dtype
) -> None:
    x, weight = 3 * randn(rows, k, dtype=dtype), randn(2 * n if gated else n, k, dtype=dtype, seed=1) * k**-0.5
    scale = 1 + 0.2 * randn(k, seed=2)
    stream = randn(rows, n, dtype=dtype, seed=3) if added else None
    old = stream.double() if stream is not None else 0.0
    got = rows_triton.row_product(
        x, weight, plan, norm=(scale, 1e-6) if normed else None, gated=gated, stream=stream, out=stream
    )
    expected = norm.rms_norm(x.double(), scale.double(), 1e-6) if normed else x.double()
    expected = expected @ weight.double().t()
    expected = activation.silu_mul(expected) if gated else expected + old
    assert got.dtype == dtype
    assert error(got, expected) < TOLERANCE[dtype]


def test_each_split_is_the_product_of_its_columns() -> None:
    x, weight = randn(2, 256), randn(32, 256, seed=1)
    parts = rows_triton.row_product(x, weight, RowPlan("dot", 32, 64, splits=2, stages=1))
    for s, part in enumerate(parts):
        columns = slice(128 * s, 128 * (s + 1))
        assert error(part, x[:, columns].double() @ weight[:, columns].double().t()) < 1e-6


def test_what_a_kernel_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        rows_triton.row_product(randn(2, 64), randn(8, 64), FMA)
    with pytest.raises(ValueError, match="17 rows"):
        rows_triton.row_product(randn(17, 64), randn(8, 64), DOT)
    with pytest.raises(ValueError, match="no whole sums"):
        rows_triton.row_product(randn(2, 64), randn(8, 64), DOT, gated=True)
    with pytest.raises(ValueError, match="contiguous"):
        rows_triton.row_product(randn(2, 64), randn(64, 32).t(), DOT)


def test_a_table_answers_for_its_shapes_with_the_next_row_count_listed() -> None:
    four = {"kind": "dot", "block_n": 32, "block_k": 128, "splits": 4, "warps": 8, "stages": 3, "ahead": 1}
    one = {"kind": "fma", "block_n": 4, "block_k": 64}
    plans = RowPlans({"plain 256x64": {"1": one, "4": four}, "gated 128x64": {"1": one}})
    assert plans.plan(128, 64, 1, "gated") == RowPlan("fma", 4, 64)
    assert plans.plan(128, 64, 1) == plans.plan(256, 64, 1, "gated") == LIBRARY
    assert plans.plan(256, 64, 1) == RowPlan("fma", 4, 64)
    assert plans.plan(256, 64, 2) == plans.plan(256, 64, 4) == RowPlan("dot", 32, 128, 4, 8, 3, 1)
    assert plans.plan(256, 64, 5) == plans.plan(64, 256, 1) == LIBRARY
