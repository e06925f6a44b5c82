"""Row products against float64 ones, the sums of their splits, and the table that chooses between them."""

from __future__ import annotations

import json

import pytest
import torch

from nextn.kernels import activation
from nextn.kernels.row_plans import FIXED, HOPPER, LIBRARY, TABLE, RowPlan, RowPlans, measured_plans
from tests.kernels.cases import DTYPES, TOLERANCE, error, poison, randn, real

pytest.importorskip("triton")
from nextn.kernels import norm_triton, rows_triton

FMA = RowPlan("fma", 8, 64)
DOT = RowPlan("dot", 32, 64, splits=2, stages=2)
SWAP = RowPlan("swap", 64, 64, splits=2, stages=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,n,k,plan",
    [(1, 40, 192, FMA), (1, 7, 100, FMA), (1, 70, 256, DOT), (4, 70, 256, DOT), (16, 32, 200, DOT), (3, 100, 320, SWAP),
     (9, 33, 64, RowPlan("dot", 32, 64, splits=1)), (5, 64, 72, RowPlan("swap", 64, 64, splits=1)),
     (4, 12, 40, LIBRARY), (33, 40, 192, RowPlan("swap", 32, 64, splits=2, block_m=32)),
     (20, 40, 100, RowPlan("dot", 32, 64, block_m=32)), (1, 7, 100, RowPlan("fma", 2, 128)),
     (3, 100, 320, RowPlan("swap", 64, 64, splits=2, first=1)), (20, 40, 100, RowPlan("dot", 32, 64, first=2)),
     (2, 40, 48, RowPlan("swap", 64, 64, first=1)), real(32, 18432, 2560, RowPlan("swap", 64, 64, block_m=32)),
     real(1, 12352, 2560, RowPlan("fma", 4, 1024, warps=4)), real(1, 8224, 1024, RowPlan("fma", 8, 1024)),
     real(4, 12352, 2560, RowPlan("swap", 64, 128, stages=4, ahead=4, first=1)),
     real(4, 1024, 3584, RowPlan("swap", 64, 128, splits=4, stages=4, first=2)),
     (5, 70, 320, RowPlan("dot", 32, 64, splits=2, first=2)), (2, 33, 48, RowPlan("swap", 64, 64, first=2)),
     (2, 40, 64, FMA), (3, 7, 100, RowPlan("fma", 2, 128)), (4, 33, 200, RowPlan("fma", 4, 256)),
     real(4, 8224, 1024, RowPlan("fma", 4, 1024)), real(3, 1024, 3584, RowPlan("fma", 2, 4096)),
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
    "rows,inter,k,plan",
    [(1, 40, 64, FMA), (4, 33, 100, RowPlan("fma", 4, 128)), (2, 7, 64, RowPlan("fma", 2, 64)), (1, 20, 192, FMA),
     (3, 33, 64, RowPlan("fma", 1, 64)), (4, 50, 128, RowPlan("swap", 64, 64, stages=2)), (5, 70, 100, DOT),
     (3, 70, 100, RowPlan("dot", 32, 64, first=1)), (20, 33, 192, RowPlan("swap", 32, 64, block_m=32, first=2)),
     (3, 10, 64, LIBRARY), (2, 1, 64, FMA), (3, 1, 64, RowPlan("swap", 32, 32)),
     real(4, 3584, 1024, RowPlan("swap", 64, 128, stages=4, ahead=4, first=2)),
     real(1, 9216, 2560, RowPlan("fma", 2, 4096)), real(4, 3584, 1024, RowPlan("fma", 4, 1024)),
     real(32, 12288, 4096, RowPlan("dot", 64, 64, stages=4, block_m=32))],
)  # fmt: skip
def test_a_product_that_ends_in_the_activation(
    rows: int, inter: int, k: int, plan: RowPlan, dtype: torch.dtype
) -> None:
    x, weight = randn(rows, k, dtype=dtype), randn(2 * inter, k, dtype=dtype, seed=1) * k**-0.5
    got = rows_triton.gated_product(x, weight, plan)
    assert got.shape == (rows, inter)
    assert got.dtype == dtype
    stored = (x.double() @ weight.double().t()).to(dtype).double()
    assert error(got, activation.silu_mul(stored)) < TOLERANCE[dtype]
    in_one = plan.splits == 1 and plan.block_n > 1 and (plan.kind != "fma" or k <= plan.block_k)
    if plan.kind != "library" and in_one:
        around = poison(rows + 2, inter, dtype=dtype)
        rows_triton.row_product(x, weight, plan, out=around[1:-1], gated=True)
        assert around[[0, -1]].isnan().all()
        assert torch.equal(around[1:-1], got)


def test_each_split_is_the_product_of_its_columns() -> None:
    x, weight = randn(2, 256), randn(32, 256, seed=1)
    parts = rows_triton.row_product(x, weight, RowPlan("dot", 32, 64, splits=2, stages=1))
    for s, part in enumerate(parts):
        columns = slice(128 * s, 128 * (s + 1))
        assert error(part, x[:, columns].double() @ weight[:, columns].double().t()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,n,k,plan",
    [(40, 40, 192, SWAP), (19, 70, 100, FIXED), real(128, 12352, 2560, FIXED), real(33, 2560, 9216, SWAP)],
)  # fmt: skip
def test_a_row_has_the_same_bits_whatever_stands_beside_it(
    rows: int, n: int, k: int, plan: RowPlan, dtype: torch.dtype
) -> None:
    x, weight = randn(rows, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1)
    together = rows_triton.row_product(x, weight, plan)
    assert error(together.sum(0) if plan.splits > 1 else together, x.double() @ weight.double().t()) < TOLERANCE[dtype]
    for i in (0, 1, 16, rows - 1):
        assert torch.equal(rows_triton.row_product(x[i : i + 1], weight, plan)[..., 0, :], together[..., i, :])
    assert torch.equal(rows_triton.row_product(x[3:9], weight, plan), together[..., 3:9, :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,inter,k,plan",
    [(19, 70, 100, FIXED), (20, 33, 192, RowPlan("dot", 32, 64, first=1)), (18, 20, 100, SWAP),
     real(128, 3584, 1024, FIXED), real(33, 9216, 2560, RowPlan("swap", 64, 64, stages=6))],
)  # fmt: skip
def test_a_gated_row_has_the_same_bits_whatever_stands_beside_it(
    rows: int, inter: int, k: int, plan: RowPlan, dtype: torch.dtype
) -> None:
    x, weight = randn(rows, k, dtype=dtype), randn(2 * inter, k, dtype=dtype, seed=1) * k**-0.5
    together = rows_triton.gated_product(x, weight, plan)
    for i in (0, 1, 16, rows - 1):
        assert torch.equal(rows_triton.gated_product(x[i : i + 1], weight, plan)[0], together[i])
    assert torch.equal(rows_triton.gated_product(x[3:9], weight, plan), together[3:9])


def test_what_a_kernel_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        rows_triton.row_product(randn(2, 65), randn(8, 65), FMA)
    with pytest.raises(ValueError, match="5 rows"):
        rows_triton.row_product(randn(5, 64), randn(8, 64), FMA)
    with pytest.raises(ValueError, match="contiguous"):
        rows_triton.row_product(randn(2, 64), randn(64, 32).t(), DOT)


@pytest.mark.parametrize("plan", [LIBRARY, DOT, RowPlan("fma", 1, 128), FMA])
def test_a_plan_that_cannot_end_in_the_activation_is_refused(plan: RowPlan) -> None:
    with pytest.raises(ValueError, match="all 100 inputs of a gate"):
        rows_triton.row_product(randn(1, 100), randn(8, 100), plan, gated=True)


def test_a_table_answers_for_its_shapes_with_the_next_row_count_listed() -> None:
    four = {"kind": "dot", "block_n": 32, "block_k": 128, "splits": 4, "warps": 8, "stages": 3, "ahead": 1}
    plans = RowPlans({"256x64": {"1": {"kind": "fma", "block_n": 4, "block_k": 64}, "4": four}})
    assert plans.plan(256, 64, 1) == RowPlan("fma", 4, 64)
    assert plans.plan(256, 64, 2) == plans.plan(256, 64, 4) == RowPlan("dot", 32, 128, 4, 8, 3, 1)
    assert plans.plan(256, 64, 5) == plans.plan(64, 256, 1) == LIBRARY


def test_a_table_answers_for_shapes_near_its_own() -> None:
    kinds = {32: "dot", 100: "swap", 5: "fma"}
    plans = RowPlans({f"{n}x64": {"4": {"kind": kind}} for n, kind in kinds.items()})
    found = {n: plans.plan(n, 64, 2).kind for n in (2, 3, 5, 10, 11, 16, 17, 56, 57, 100, 200, 201)}
    near = {2: "library", 3: "fma", 5: "fma", 10: "fma", 11: "library", 16: "dot", 17: "dot", 56: "dot", 57: "swap"}
    assert found == {**near, 100: "swap", 200: "swap", 201: "library"}


def test_one_plan_for_any_number_of_rows_is_never_the_library() -> None:
    sixteen = {"kind": "swap", "block_n": 32, "block_k": 128, "splits": 4}
    plans = RowPlans({"256x64": {"16": sixteen}, "64x256": {"1": sixteen, "16": {"kind": "library"}}})
    assert plans.fixed(256, 64) == RowPlan("swap", 32, 128, 4)
    assert plans.fixed(64, 256) == plans.fixed(1, 1) == FIXED


def test_another_kind_of_gpu_multiplies_by_the_library() -> None:
    """The measured plans may not fit there: the largest takes 184 KB of shared memory."""
    shapes = [tuple(map(int, shape.split("x"))) for shape in json.loads(TABLE.read_text())["plans"]]
    assert {measured_plans((8, 9)).plan(n, k, 4) for n, k in shapes} == {LIBRARY}
    assert {measured_plans((8, 9)).fixed(n, k) for n, k in shapes} == {FIXED}
    assert any(measured_plans(HOPPER).plan(n, k, 4) != LIBRARY for n, k in shapes)


EARLY = [
    RowPlan("swap", 64, 64, splits=2, stages=3, first=1, ahead=2), RowPlan("swap", 32, 128, stages=3, first=2),
    RowPlan("dot", 64, 64, splits=4, stages=3, ahead=2), RowPlan("fma", 4, 1024),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < HOPPER, reason="needs dependent launch"
)
@pytest.mark.parametrize("plan", EARLY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_that_starts_early_has_the_bits_of_one_that_waits(plan: RowPlan, dtype: torch.dtype) -> None:
    """Norms and products in turn, each reading what the one before it wrote, the partial sums' memory used again."""
    weights = [randn(1024, 1024, dtype=dtype, seed=s) for s in range(4)]
    scale, start = randn(1024, seed=9), randn(4, 1024, dtype=dtype)

    def chain(pdl: bool) -> list[torch.Tensor]:
        x, seen = start, []
        for i in range(40):
            h = norm_triton.add_rms_norm(x, None, scale, 1e-6, dtype=dtype, pdl=pdl)[0]
            x = rows_triton.row_product(h, weights[i % 4], plan, pdl=pdl)
            seen.append(h)
        return seen

    expected = chain(False)
    torch.cuda.synchronize()
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(20):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
