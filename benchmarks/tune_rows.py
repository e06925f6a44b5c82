"""Measure every candidate kernel for the row products of the Qwen3.5 shapes and write the table of the fastest.

    python benchmarks/tune_rows.py [--rows 1 4 16] [--out src/nextn/kernels/rows_h200.json]

Each candidate runs over several weights of the shape in one CUDA graph, more than the L2 cache holds, with dependent
launch as in decoding; cuBLAS is a candidate like any other. A product with partial sums is charged for the time that
its reader takes to add them. A product whose halves are gated is listed where one kernel beats product and gate apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from geometries import GEOMETRIES
from gpu_timing import captured, median_ms, provenance, read_gb_per_s
from triton.runtime.errors import OutOfResources

from nextn.kernels.activation_triton import silu_mul
from nextn.kernels.row_plans import LIBRARY, TABLE, RowPlan
from nextn.kernels.rows_triton import row_product

BF16 = torch.bfloat16
ROTATE_BYTES = 250_000_000
READER_BYTES_PER_US = 100_000
"""Of one program that adds partial sums up: a norm has one a row, wider products are read by many programs."""

FMA = [RowPlan("fma", n, k) for n, k in ((2, 1024), (4, 512), (4, 1024), (8, 512), (16, 256))]
TILES = [
    ("dot", 16, 256, 4, 4), ("dot", 32, 128, 4, 5), ("dot", 32, 256, 4, 3), ("dot", 64, 128, 4, 4),
    ("swap", 64, 64, 4, 6), ("swap", 64, 128, 4, 4), ("swap", 64, 256, 4, 3), ("swap", 128, 64, 4, 5),
]  # fmt: skip


def candidates(n: int, k: int, rows: int, gated: bool) -> Iterator[RowPlan]:
    """Plans that divide the shape evenly and keep the card's 132 processors busy without tiny pieces."""
    if rows == 1:
        yield from FMA
    for kind, bn, bk, warps, stages in TILES:
        for splits in (1,) if gated else (1, 2, 4, 8):
            programs = -(-n // bn) * splits
            if k % (splits * bk) == 0 and (splits == 1 or programs <= 1100) and programs >= 64:
                for ahead in (0, 4):
                    if ahead * bk * splits <= k:
                        yield RowPlan(kind, bn, bk, splits, warps, stages, ahead)


def shapes() -> list[tuple[int, int, bool]]:
    """(outputs, inputs, gated); a gated product follows the plain one of its weight."""
    plain = sorted({shape for g in GEOMETRIES.values() for shape in g.products.values()})
    gated = {g.products["gate_up"] for g in GEOMETRIES.values()}
    return [(n, k, False) for n, k in plain] + [(n // 2, k, True) for n, k in sorted(gated)]


def run(plan: RowPlan, n: int, k: int, rows: int, gated: bool) -> None:
    """Run a plan once, which leaves its binary in Triton's cache on disk."""
    x = torch.zeros(rows, k, dtype=BF16, device="cuda")
    weight = torch.zeros(2 * n if gated else n, k, dtype=BF16, device="cuda")
    try:
        row_product(x, weight, plan, gated=gated, pdl=True)
    except OutOfResources as error:
        print(f"left out {plan}, gated {gated}: {error}")


def compile_all(rows: list[int]) -> int:
    """Compile all candidates in parallel; sizes are run-time values, so a small shape compiles for all."""
    jobs: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for n, k, gated in shapes():
        for r in rows:
            for p in candidates(n, k, r, gated):
                key = (p.kind, p.block_n, p.block_k, p.warps, p.stages, p.ahead, p.splits > 1, gated, r == 1, r == 16)
                jobs.setdefault(key, (p, 16 * p.block_n, p.splits * p.block_k * 16, r, gated))
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(run, *zip(*jobs.values(), strict=True), chunksize=4))
    return len(jobs)


def measure(call: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    """Microseconds a call."""
    return median_ms(captured(lambda: [call(w) for w in weights]), repeats=7) * 1e3 / len(weights)


def tune(n: int, k: int, rows: int, gated: bool, apart: RowPlan) -> tuple[RowPlan | None, dict[str, Any]]:
    """The best plan, or None where a gated product does better apart, by plan `apart`; and the times by kind."""
    weight_rows = 2 * n if gated else n
    count = min(max(4, ROTATE_BYTES // (weight_rows * k * 2)), 40)
    weights = [torch.randn(weight_rows, k, dtype=BF16, device="cuda") * k**-0.5 for _ in range(count)]
    x = torch.randn(rows, k, dtype=BF16, device="cuda")
    expected = x.float() @ weights[-1].float().t()
    if gated:
        expected = silu_mul(expected)
        times = {
            "apart": measure(lambda w: silu_mul(row_product(x, w, apart, pdl=True), dtype=BF16, pdl=True), weights)
        }
        charged = {None: times["apart"]}
    else:
        times = {"library": measure(lambda w: row_product(x, w, LIBRARY), weights)}
        charged = {LIBRARY: times["library"]}
    for plan in candidates(n, k, rows, gated):
        try:
            got = row_product(x, weights[-1], plan, gated=gated).float()
            us = measure(lambda w, plan=plan: row_product(x, w, plan, gated=gated, pdl=True), weights)
        except OutOfResources:
            continue
        got = got.sum(0) if got.dim() == 3 else got
        wrong = float((got - expected).norm() / expected.norm())
        if not wrong < 1e-2:
            raise SystemExit(f"{plan} is wrong for {rows} x {n} x {k}, gated {gated}: {wrong:.2g}")
        extra = (plan.splits - 1) * n * 4 / READER_BYTES_PER_US / (1 if n <= 4096 else 16)
        charged[plan] = us + extra
        times[plan.kind] = min(us, times.get(plan.kind, us))
    return min(charged, key=charged.__getitem__), times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--seconds", type=float, default=1e9, help="leave out the shapes that come after this time")
    options = parser.parse_args()
    began = time.time()
    compiled = compile_all(options.rows)
    bandwidth = read_gb_per_s()
    print(f"{compiled} kernels compiled in {time.time() - began:.0f} s; {bandwidth:.0f} GB/s", flush=True)
    plans: dict[str, dict[str, Any]] = {}
    figures = []
    for n, k, gated in shapes():
        for rows in options.rows:
            if time.time() - began > options.seconds:
                print(f"no time left for {n}x{k}, {rows} rows", flush=True)
                continue
            plain = plans.get(f"{2 * n}x{k}", {}).get(str(rows))
            best, times = tune(n, k, rows, gated, RowPlan(**plain) if plain else LIBRARY)
            shape = f"gated {n}x{k}" if gated else f"{n}x{k}"
            if best is not None:
                plans.setdefault(shape, {})[str(rows)] = asdict(best)
            floor = n * k * (4 if gated else 2) / bandwidth / 1e3
            rounded = {f"{kind}_us": round(us, 2) for kind, us in times.items()}
            figures.append({"shape": shape, "rows": rows, "floor_us": round(floor, 2), **rounded})
            print(figures[-1], *(asdict(best).values() if best else ("apart",)), flush=True)
        torch.cuda.empty_cache()
    record = {**provenance(), "read_gb_per_s": round(bandwidth), "plans": plans, "figures": figures}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {options.out} after {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
