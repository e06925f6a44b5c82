"""Which kernel multiplies a few rows with a weight of some shape fastest: a table measured on one machine.

``rows_h200.json`` is written by ``benchmarks/tune_rows.py``, which times a shape's products by themselves, and
``benchmarks/tune_in_place.py``, which times them inside a whole forward. A shape that it does not list is treated as
the nearest one with as many inputs and up to twice or half the outputs, and goes to the library where there is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any, Literal

FIXED_ROWS = 16
"""Rows whose plan serves any number of them."""
TABLE = Path(__file__).with_name("rows_h200.json")
HOPPER = (9, 0)

Kind = Literal["fma", "dot", "swap", "library"]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How to run one product.

    Attributes:
        kind: `fma` (multiply-add: one row, or up to four where `block_k` holds all inputs), `dot` and `swap` (tensor
            cores, rows or weights on the wide side), or `library` (cuBLAS).
        block_n, block_k: tile of the weight.
        splits: along K; more than one leaves partial sums.
        stages: tiles in flight.
        ahead: tiles asked into the L2 cache before the wait of a dependent launch, after the `first`.
        block_m: rows that a program of the tensor-core kernels takes.
        first: tiles, 0 to 2, that a program of the tensor-core kernels loads before that wait.
    """

    kind: Kind
    block_n: int = 0
    block_k: int = 0
    splits: int = 1
    warps: int = 4
    stages: int = 1
    ahead: int = 0
    block_m: int = 16
    first: int = 0


LIBRARY = RowPlan("library")
FIXED = RowPlan("swap", 64, 64, stages=4)
"""For a shape that is not listed, where the library may not be used."""


class RowPlans:
    """A table of plans.

    Args:
        table: "NxK" -> {"rows": fields of a `RowPlan`}.
    """

    def __init__(self, table: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        self._plans: dict[int, dict[int, list[tuple[int, RowPlan]]]] = {}
        for shape, by_rows in table.items():
            n, k = map(int, shape.split("x"))
            plans = sorted((int(rows), RowPlan(**fields)) for rows, fields in by_rows.items())
            self._plans.setdefault(k, {})[n] = plans

    def plan(self, n: int, k: int, rows: int) -> RowPlan:
        """For `rows` rows and n outputs of k inputs: the one listed for the fewest rows not below, or the library."""
        alike = {width: plans for width, plans in self._plans.get(k, {}).items() if width <= 2 * n <= 4 * width}
        listed = alike[min(alike, key=lambda width: abs(log(width / n)))] if alike else []
        return next((plan for most, plan in listed if most >= rows), LIBRARY)

    def fixed(self, n: int, k: int) -> RowPlan:
        """One plan of ours for any number of rows, so that a row's result does not depend on how many there are."""
        plan = self.plan(n, k, FIXED_ROWS)
        return FIXED if plan.kind == "library" else plan


@cache
def measured_plans(capability: tuple[int, int] = HOPPER) -> RowPlans:
    """The plans measured on an H200.

    Args:
        capability: of the GPU; another kind than Hopper gets an empty table. Some plans take more shared memory than
            a block has there.
    """
    return RowPlans(json.loads(TABLE.read_text())["plans"] if capability == HOPPER else {})
