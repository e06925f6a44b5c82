"""Measure every candidate kernel for the row products of the Qwen3.5 shapes and write the table of the fastest.

    python benchmarks/tune_rows.py --rows 1 4 16 32 --out src/nextn/kernels/rows_h200.json

Each candidate runs over several weights of the shape in one CUDA graph, more than the L2 cache holds, with dependent
launch as in decoding; cuBLAS is a candidate like any other. A product with partial sums is charged for the time that
its reader takes to add them. The best few are then tried with weights loaded and asked into the L2 cache before the
wait. Shapes that are not measured keep the plans of the table in use. The file is written after each row count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import PRINTED, need_gpu, positive
from benchmarks.geometries import GEOMETRIES
from benchmarks.gpu_timing import captured, median_ms, provenance, read_gb_per_s
from benchmarks.with_triton import OutOfResources
from nextn.kernels.row_plans import LIBRARY, TABLE, RowPlan
from nextn.kernels.rows_triton import gated_product, row_product

BF16 = torch.bfloat16
ROTATE_BYTES = 250_000_000
PRODUCTS_A_GRAPH = 24
"""Enough that starting the graph is a small part of its time."""
READER_BYTES_PER_US = 100_000
"""Of one program that adds partial sums up: a norm has one a row, wider products are read by many programs."""

FMA = [
    RowPlan("fma", n, k)
    for n, k in ((2, 1024), (4, 512), (4, 1024), (8, 512), (16, 256), (8, 1024), (2, 2048), (2, 4096))
]
TILES = [
    ("dot", 32, 128, 4, 5), ("dot", 64, 128, 4, 4), ("swap", 64, 64, 4, 6), ("swap", 64, 64, 4, 8),
    ("swap", 64, 128, 4, 4), ("swap", 64, 128, 4, 5), ("swap", 64, 256, 4, 3), ("swap", 128, 64, 4, 5),
    ("swap", 128, 128, 8, 4), ("swap", 32, 128, 4, 5),
]  # fmt: skip
EARLY = ((0, 1), (0, 2), (8, 0), (8, 1))
"""Tiles asked into the L2 cache, and tiles loaded, before the wait."""
FINALISTS = 3
DRAFT_VOCAB = 32768
"""Ids of the reduced draft vocabulary whose projection is measured too."""


def candidates(n: int, k: int, rows: int) -> Iterator[RowPlan]:
    """Plans that divide the shape evenly and keep the card's 132 processors busy without tiny pieces."""
    if rows == 1:
        yield from FMA
    for kind, bn, bk, warps, stages in TILES:
        for splits in (1, 2, 4, 8):
            programs = -(-n // bn) * splits
            if k % (splits * bk) == 0 and (splits == 1 or programs <= 1100) and programs >= 64:
                yield RowPlan(kind, bn, bk, splits, warps, stages, block_m=16 if rows <= 16 else 32)


def early(plan: RowPlan, k: int) -> Iterator[RowPlan]:
    """A tensor-core plan with weights fetched before the wait."""
    if plan.kind in ("dot", "swap"):
        for ahead, first in EARLY:
            ahead = min(ahead, k // (plan.splits * plan.block_k) - first)
            if ahead >= 0 and ahead + first > 0:
                yield replace(plan, ahead=ahead, first=first)


def shapes(names: list[str]) -> list[tuple[int, int]]:
    """(outputs, inputs) of each product."""
    geometries = [GEOMETRIES[name] for name in names]
    reduced = {(DRAFT_VOCAB, g.hidden) for g in geometries}
    return sorted(reduced.union(*(g.products.values() for g in geometries)))


def run(plan: RowPlan, n: int, k: int, rows: int, gated: bool = False) -> None:
    """Run a plan once, which leaves its binary in Triton's cache on disk."""
    x, weight = (torch.zeros(*size, dtype=BF16, device="cuda") for size in ((rows, k), (n, k)))
    try:
        (gated_product if gated else row_product)(x, weight, plan, pdl=True)
    except OutOfResources as error:
        print(f"left out {plan}: {error}")


def compile_all(sizes: list[tuple[int, int]], rows: list[int]) -> int:
    """Compile all candidates in parallel; sizes are run-time values, so a small shape compiles for all."""
    jobs: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for n, k in sizes:
        for r in rows:
            for plan in candidates(n, k, r):
                whole = plan.kind == "fma" and k <= plan.block_k
                for p in (plan, *early(plan, k)):
                    size = (p.kind, p.block_n, p.block_k, p.warps, p.stages, p.block_m)
                    key = (*size, p.ahead, p.first, p.splits > 1, whole)
                    inputs = p.block_k if whole else p.splits * p.block_k * 16
                    jobs.setdefault(key, (p, 16 * p.block_n, inputs, r))
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(run, *zip(*jobs.values(), strict=True), chunksize=4))
    return len(jobs)


def measure(call: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    """Microseconds a call."""
    again = -(-PRODUCTS_A_GRAPH // len(weights))
    graph = captured(lambda: [call(w) for _ in range(again) for w in weights])
    return median_ms(graph, repeats=5) * 1e3 / (again * len(weights))


def tune(n: int, k: int, rows: int) -> tuple[RowPlan, dict[str, float]]:
    """The best plan, and the times by kind."""
    count = min(max(4, ROTATE_BYTES // (n * k * 2)), 40)
    weights = [torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5 for _ in range(count)]
    x = torch.randn(rows, k, dtype=BF16, device="cuda")
    expected = x.float() @ weights[-1].float().t()
    times = {"library": measure(lambda w: row_product(x, w, LIBRARY), weights)}
    charged = {LIBRARY: times["library"]}

    def run_all(plans: Iterable[RowPlan], label: str = "") -> None:
        for plan in plans:
            try:
                got = row_product(x, weights[-1], plan, pdl=True).float()
                us = measure(lambda w, plan=plan: row_product(x, w, plan, pdl=True), weights)
            except OutOfResources:
                continue
            got = got.sum(0) if got.dim() == 3 else got
            wrong = float((got - expected).norm() / expected.norm())
            if not wrong < 1e-2:
                raise SystemExit(f"{plan} is wrong for {rows} rows, {n}x{k}: {wrong:.2g}")
            charged[plan] = us + (plan.splits - 1) * n * 4 / READER_BYTES_PER_US / (1 if n <= 4096 else 16)
            name = label or plan.kind
            times[name] = min(us, times.get(name, us))

    run_all(candidates(n, k, rows))
    finalists = sorted(charged, key=charged.__getitem__)[:FINALISTS]
    run_all((p for plan in finalists for p in early(plan, k)), "early")
    return min(charged, key=charged.__getitem__), times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", nargs="+", choices=sorted(GEOMETRIES), default=list(GEOMETRIES))
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 4, 16])
    parser.add_argument("--phase", choices=["both", "compile", "measure"], default="both")
    parser.add_argument("--out", type=Path, help=PRINTED)
    options = parser.parse_args()
    need_gpu()
    began = time.time()
    sizes = shapes(options.geometry)
    compiled = compile_all(sizes, options.rows) if options.phase != "measure" else 0
    if options.phase == "compile":
        return
    bandwidth = read_gb_per_s()
    print(f"{compiled} kernels compiled in {time.time() - began:.0f} s; {bandwidth:.0f} GB/s", flush=True)
    old = json.loads(TABLE.read_text()) if TABLE.exists() else {"plans": {}, "figures": []}
    plans, figures = old["plans"], []
    for rows in options.rows:
        for n, k in sizes:
            best, times = tune(n, k, rows)
            plans.setdefault(f"{n}x{k}", {})[str(rows)] = asdict(best)
            rounded = {f"{kind}_us": round(us, 2) for kind, us in times.items()}
            floor = round(n * k * 2 / bandwidth / 1e3, 2)
            figures.append({"shape": f"{n}x{k}", "rows": rows, "floor_us": floor, **rounded})
            print(*figures[-1].items(), *asdict(best).values(), flush=True)
            torch.cuda.empty_cache()
        measured = {(f["shape"], f["rows"]) for f in figures}
        kept = [f for f in old["figures"] if (f["shape"], f["rows"]) not in measured]
        record = {**provenance("src/nextn/kernels"), "read_gb_per_s": round(bandwidth)}
        text = json.dumps({**record, "plans": plans, "figures": figures + kept}, indent=1) + "\n"
        if options.out is not None:
            options.out.write_text(text)
        print(f"{rows} rows done after {time.time() - began:.0f} s", flush=True)
    if options.out is None:
        print(text)


if __name__ == "__main__":
    main()
