"""The changes that the search in place tries, and the table that it measures with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
from benchmarks.geometries import GEOMETRIES, VOCAB
from benchmarks.tune_in_place import FIELDS, Changed, moves
from nextn.kernels.row_plans import LIBRARY, RowPlan, RowPlans

SHAPES = sorted({shape for g in GEOMETRIES.values() for shape in g.products.values()})


@given(st.sampled_from(SHAPES), st.sampled_from([1, 4]), st.data())
def test_a_walk_of_moves_stays_among_plans_that_divide_the_shape(
    shape: tuple[int, int], rows: int, data: st.DataObject
) -> None:
    n, k = shape
    plan = RowPlan("swap", 64, 64, stages=4)
    for _ in range(6):
        new = data.draw(st.sampled_from(sorted(moves(plan, n, k, rows), key=str)))
        changed = {f for f in FIELDS["dot"] if getattr(new, f) != getattr(plan, f)}
        pairs = {"block_n", "splits"}, {"block_k", "stages"}
        assert len(changed) == 1 or changed in pairs or new.kind != plan.kind
        plan = new
        if plan.kind == "fma":
            assert rows == 1 or plan.block_k >= k
        else:
            step = plan.splits * plan.block_k
            assert k % step == 0
            assert plan.first + plan.ahead <= k // step
            assert plan.splits == 1 or n < VOCAB


def test_a_changed_table_answers_with_the_plans_put_into_it() -> None:
    table = RowPlans({"256x64": {"4": {"kind": "dot", "block_n": 32, "block_k": 64}}})
    mine = RowPlan("swap", 64, 64)
    own: dict[tuple[int, int], RowPlan] = {}
    changed = Changed(table, own)
    assert changed.plan(256, 64, 4) == RowPlan("dot", 32, 64)
    own[256, 64] = mine
    assert [changed.plan(256, 64, rows) for rows in (1, 4, 32)] == [mine] * 3
    assert changed.plan(64, 256, 4) == LIBRARY
