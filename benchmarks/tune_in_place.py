"""Tune the plans of row products where they work: inside a whole forward of a Qwen3.5 geometry, batch 1.

    python benchmarks/tune_in_place.py 4b:4 9b:1 --out src/nextn/kernels/rows_h200.json

`tune_rows.py` times a product among others of its own shape. Here a geometry's kernels run in order, in one graph
under dependent launch (`decode_chain.py`), and a plan is judged by the forward's time: what its start takes from the
kernel before, and what adding its partial sums up costs the one behind, are in it. From the table in use the search
changes one field of one plan at a time, and keeps a change that makes the forward faster twice over. `GEOMETRY:ROWS`
names a forward; each is given `--seconds`. The file is written after each forward.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import PRINTED, need_gpu, positive
from benchmarks.decode_chain import Chain
from benchmarks.geometries import GEOMETRIES, VOCAB
from benchmarks.gpu_timing import captured, median_ms, provenance
from benchmarks.tune_rows import BF16, run
from benchmarks.with_triton import OutOfResources
from nextn.engine.logits import power_of_two
from nextn.kernels.row_plans import TABLE, RowPlan, RowPlans, measured_plans
from nextn.kernels.rows_triton import FMA_ROWS, row_product

Shape = tuple[int, int]

CONTEXT = 1024
GAIN = 0.9995
"""A change must make the forward this much faster."""
LARGEST_TILE = 64 * 1024
"""Bytes of weights in a tile."""
FIELDS: dict[str, dict[str, tuple[int, ...]]] = {
    "fma": {"block_n": (1, 2, 4, 8, 16), "block_k": (256, 512, 1024, 2048, 4096), "warps": (2, 4, 8)},
    "dot": {
        "block_n": (32, 64, 128), "block_k": (64, 128, 256), "splits": (1, 2, 3, 4, 5, 6, 8), "warps": (4, 8),
        "stages": (2, 3, 4, 5, 6, 7, 8, 10), "ahead": (0, 2, 4, 8), "first": (0, 1, 2),
    },
}  # fmt: skip
FIELDS["swap"] = FIELDS["dot"]
DEFAULTS = {
    "fma": (RowPlan("fma", 2, 1024),),
    "dot": (RowPlan("dot", 32, 128, stages=4),),
    "swap": (RowPlan("swap", 64, 128, stages=4),),
}


class Changed(RowPlans):
    """A table in which the plans of some shapes are replaced, for any number of rows.

    Attributes:
        own: (outputs, inputs) -> plan.
    """

    def __init__(self, table: RowPlans, own: dict[Shape, RowPlan]) -> None:
        self.table, self.own = table, own

    def plan(self, n: int, k: int, rows: int) -> RowPlan:
        return self.own.get((n, k)) or self.table.plan(n, k, rows)


def neighbours(plan: RowPlan) -> Iterator[RowPlan]:
    """Plans that differ from `plan` in one field by one place; in tile and splits, with as many programs; or in tile
    and stages, with as many bytes in flight."""
    fields = FIELDS.get(plan.kind, {})

    def place(one: RowPlan, field: str, by: int) -> Iterator[RowPlan]:
        values = sorted({*fields[field], getattr(one, field)})
        at = values.index(getattr(one, field)) + by
        if 0 <= at < len(values):
            yield replace(one, **{field: values[at]})

    for by in (-1, 1):
        for field in fields:
            yield from place(plan, field, by)
        if plan.kind == "fma":
            continue
        for wider in place(plan, "block_n", by):
            yield replace(wider, splits=plan.splits * 2 if by > 0 else max(1, plan.splits // 2))
        for deeper in place(plan, "block_k", by):
            yield replace(deeper, stages=max(2, plan.stages // 2) if by > 0 else plan.stages * 2)


def takes(plan: RowPlan, k: int, rows: int) -> bool:
    """Whether multiply-add by this plan takes so many inputs and rows, with a tile that is not too large."""
    return plan.block_n * plan.block_k <= LARGEST_TILE // 2 and (rows == 1 or (rows <= FMA_ROWS and k <= plan.block_k))


def moves(plan: RowPlan, n: int, k: int, rows: int) -> Iterator[RowPlan]:
    """Neighbours of a plan that divide the shape evenly, and plans of each other kernel."""
    whole = power_of_two(k)
    for kind, plans in DEFAULTS.items():
        if kind == plan.kind:
            continue
        if kind == "fma" and rows > 1:
            plans = tuple(RowPlan("fma", n, whole, warps=w) for n in (1, 2, 4, 8) for w in (2, 4, 8))
        yield from (new for new in plans if new.kind != "fma" or takes(new, k, rows))
    for new in neighbours(plan):
        if new.kind == "fma":
            if takes(new, k, rows):
                yield new
            continue
        step = new.splits * new.block_k
        fits = k % step == 0 and (new.first + new.ahead) * step <= k and new.first < k // step
        # Nothing adds up the partial sums of logits.
        if fits and new.block_n * new.block_k * 2 <= LARGEST_TILE and (n < VOCAB or new.splits == 1):
            yield new


def right(plan: RowPlan, n: int, k: int, rows: int) -> bool:
    """Whether a plan gives the product, against float32."""
    x = torch.randn(rows, k, dtype=BF16, device="cuda")
    weight = torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5
    got = row_product(x, weight, plan, pdl=True).float()
    got = got.sum(0) if got.dim() == 3 else got
    expected = x.float() @ weight.float().t()
    return float((got - expected).norm() / expected.norm()) < 1e-2


class Search:
    """Of the fastest plans of one forward.

    Args:
        chain: the forward.
        pool: processes that compile.
        until: when to end, by the monotonic clock.
    """

    def __init__(self, chain: Chain, pool: Executor, until: float) -> None:
        self.chain, self.pool, self.until = chain, pool, until
        self.rows = chain.batch * chain.rows
        products = [tuple(w.shape) for layer in chain.layers for w in layer.products.values()]
        sizes = {*products, tuple(chain.output.shape)}
        # Those that the forward reads most of come first.
        self.gated = tuple(chain.layers[0].products["gate_up"].shape)
        self.shapes = sorted(sizes, key=lambda s: -s[0] * s[1] * max(products.count(s), 1))
        table = chain.plans
        self.plans = {shape: table.plan(*shape, self.rows) for shape in self.shapes}
        chain.plans = Changed(table, self.plans)
        self.seen = {(shape, plan) for shape, plan in self.plans.items()}
        self.best = captured(chain.forward)
        self.tried = 0

    def compiled(self, tries: list[tuple[Shape, RowPlan]]) -> Iterator[tuple[Shape, RowPlan]]:
        """Compile in parallel, into Triton's cache on disk; those that Triton takes.

        Sizes are run-time values, so a small shape compiles for all.
        """
        jobs = []
        for shape, p in tries:
            k = shape[1]
            inputs = p.block_k if p.kind == "fma" and k <= p.block_k else p.splits * p.block_k * 16
            jobs.append(self.pool.submit(run, p, 16 * p.block_n, inputs, self.rows, shape == self.gated))
        for one, job in zip(tries, jobs, strict=True):
            if (error := job.exception()) is None:
                yield one
            else:
                print(f"left out {one}: {error}", flush=True)

    def better(self, shape: Shape, plan: RowPlan) -> bool:
        """Try a plan in the forward, and keep it there where it is faster."""
        before = self.plans[shape]
        self.plans[shape] = plan
        self.tried += 1
        try:
            replay = captured(self.chain.forward)
        except OutOfResources:
            self.plans[shape] = before
            return False
        if all(faster(replay, self.best, repeats) for repeats in (7, 31)) and right(plan, *shape, self.rows):
            self.best = replay
            return True
        self.plans[shape] = before
        return False

    def descend(self) -> None:
        """Change plans until no change helps or time is over."""
        while time.monotonic() < self.until:
            tries = [
                (shape, plan)
                for shape in self.shapes
                for plan in moves(self.plans[shape], *shape, self.rows)
                if (shape, plan) not in self.seen
            ]
            if not tries:
                return
            self.seen.update(tries)
            for shape, plan in list(self.compiled(tries)):
                if time.monotonic() > self.until:
                    return
                if self.better(shape, plan):
                    print(f"{median_ms(self.best):.4f} ms with {shape} by {plan}", flush=True)


def faster(one: Callable[[], None], other: Callable[[], None], repeats: int) -> bool:
    """Whether a graph takes less time than another, the two timed in turn."""
    return sum(median_ms(one, repeats) < GAIN * median_ms(other, repeats) for _ in range(3)) >= 2


def forward(text: str) -> tuple[str, int]:
    """GEOMETRY:ROWS.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    name, _, rows = text.partition(":")
    if name not in GEOMETRIES:
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with one of {', '.join(GEOMETRIES)}")
    return name, positive(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forwards", type=forward, nargs="+", metavar="GEOMETRY:ROWS")
    parser.add_argument("--seconds", type=positive, default=120, help="for each forward")
    parser.add_argument("--jobs", type=positive, default=12, help="processes that compile")
    parser.add_argument("--out", type=Path, help=PRINTED)
    options = parser.parse_args()
    need_gpu()
    table: dict[str, Any] = json.loads(TABLE.read_text())
    found = table.setdefault("in_place", [])
    with torch.inference_mode(), ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for name, rows in options.forwards:
            chain = Chain(GEOMETRIES[name], 1, rows, CONTEXT, measured_plans())
            search = Search(chain, pool, time.monotonic() + options.seconds)
            start = search.best
            search.descend()
            before, after = median_ms(start, 31), median_ms(search.best, 31)
            # A search that begins where an earlier one ended goes on with its count, from its first forward's time.
            earlier = next((f for f in found if (f["geometry"], f["rows"]) == (name, rows)), None)
            found[:] = [f for f in found if f is not earlier]
            found.append({"geometry": name, "rows": rows, "tried": search.tried})
            found[-1] |= {"before_ms": round(before, 4), "after_ms": round(after, 4), **provenance("src/nextn/kernels")}
            if earlier is not None:
                found[-1] |= {"tried": earlier["tried"] + search.tried, "before_ms": earlier["before_ms"]}
            print(found[-1], flush=True)
            for (n, k), plan in search.plans.items():
                table["plans"].setdefault(f"{n}x{k}", {})[str(rows)] = asdict(plan)
                print(f"{n}x{k}", plan, flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(table, indent=1) + "\n")
            del chain, search, start
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
