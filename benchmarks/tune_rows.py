"""Measure every candidate kernel for the row products of the Qwen3.5 shapes and write the table of the fastest.

    python benchmarks/tune_rows.py [--rows 1 4 16] [--out src/nextn/kernels/rows_h200.json]

Each candidate runs over several weights of the shape in one CUDA graph, more than the L2 cache holds, with dependent
launch as in decoding; cuBLAS is a candidate like any other. A product with partial sums is charged for the time that
its reader takes to add them. Products that norm, gate or add the stream are measured too, and beside them the same
work by the best plain product and separate kernels (`apart_us`).
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

from nextn.kernels import activation, norm
from nextn.kernels.activation_triton import silu_mul
from nextn.kernels.norm_triton import add_rms_norm
from nextn.kernels.row_plans import LIBRARY, TABLE, Form, RowPlan
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


def candidates(n: int, k: int, rows: int, form: Form) -> Iterator[RowPlan]:
    """Plans that divide the shape evenly and keep the card's 132 processors busy without tiny pieces."""
    if rows == 1:
        yield from FMA
    for kind, bn, bk, warps, stages in TILES:
        for splits in (1, 2, 4, 8) if form == "plain" else (1,):
            programs = -(-n // bn) * splits
            if k % (splits * bk) == 0 and (splits == 1 or programs <= 1100) and programs >= 64:
                for ahead in (0, 4):
                    if ahead * bk * splits <= k:
                        yield RowPlan(kind, bn, bk, splits, warps, stages, ahead)


def shapes() -> list[tuple[Form, int, int]]:
    """(form, outputs, inputs); plain forms come first."""
    found: dict[Form, set[tuple[int, int]]] = {"plain": set(), "norm": set(), "gated": set(), "add": set()}
    for g in GEOMETRIES.values():
        found["plain"] |= set(g.products.values())
        found["norm"] |= {g.products["gdn_in"], g.products["attn_in"]}
        found["gated"].add((g.inter, g.hidden))
        found["add"] |= {g.products[name] for name in ("gdn_out", "attn_out", "down")}
    return [(form, n, k) for form, sizes in found.items() for n, k in sorted(sizes)]


class Work:
    """One product of a form on given rows: by a plan, or apart by plain plans and other kernels."""

    def __init__(self, form: Form, n: int, k: int, rows: int) -> None:
        self.form, self.n, self.k = form, n, k
        self.weight_rows = 2 * n if form == "gated" else n
        self.x = torch.randn(rows, k, dtype=BF16, device="cuda")
        self.stream = torch.randn(rows, n, dtype=BF16, device="cuda")
        self.scale = 1 + 0.1 * torch.randn(k, device="cuda")

    def fused(self, w: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        before = (self.scale, 1e-6) if self.form in ("norm", "gated") else None
        stream = self.stream if self.form == "add" else None
        return row_product(self.x, w, plan, norm=before, gated=self.form == "gated", stream=stream, pdl=True)

    def apart(self, w: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """The product with the kernels that the form replaces; `add` leaves its addition to the norm that follows."""
        x = self.x
        if self.form in ("norm", "gated"):
            x, _ = add_rms_norm(x, x, self.scale, 1e-6, pdl=True)
        out = row_product(x, w, plan, pdl=True)
        return silu_mul(out, dtype=BF16, pdl=True) if self.form == "gated" else out

    def expected(self, w: torch.Tensor) -> torch.Tensor:
        x = self.x.float()
        if self.form in ("norm", "gated"):
            x = norm.rms_norm(x, self.scale, 1e-6)
        out = x @ w.float().t()
        if self.form == "gated":
            out = activation.silu_mul(out)
        return out + self.stream.float() if self.form == "add" else out


def run(plan: RowPlan, form: Form, n: int, k: int, rows: int) -> None:
    """Run a plan once, which leaves its binary in Triton's cache on disk."""
    work = Work(form, n, k, rows)
    try:
        work.fused(torch.zeros(work.weight_rows, k, dtype=BF16, device="cuda"), plan)
    except OutOfResources as error:
        print(f"left out {plan}, {form}: {error}")


def compile_all(rows: list[int]) -> int:
    """Compile all candidates in parallel; sizes are run-time values, so a small shape compiles for all."""
    jobs: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for form, n, k in shapes():
        for r in rows:
            for p in candidates(n, k, r, form):
                key = (p.kind, p.block_n, p.block_k, p.warps, p.stages, p.ahead, p.splits > 1, form)
                jobs.setdefault(key, (p, form, 16 * p.block_n, p.splits * p.block_k * 16, r))
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(run, *zip(*jobs.values(), strict=True), chunksize=4))
    return len(jobs)


def measure(call: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    """Microseconds a call."""
    return median_ms(captured(lambda: [call(w) for w in weights]), repeats=7) * 1e3 / len(weights)


def tune(form: Form, n: int, k: int, rows: int, plain: RowPlan) -> tuple[RowPlan, dict[str, float]]:
    """The best plan of one kernel, and the times by kind; `plain` is the best plain plan for the same weight."""
    work = Work(form, n, k, rows)
    size = work.weight_rows * k
    count = min(max(4, ROTATE_BYTES // (size * 2)), 40)
    weights = [torch.randn(work.weight_rows, k, dtype=BF16, device="cuda") * k**-0.5 for _ in range(count)]
    expected = work.expected(weights[-1])
    charged: dict[RowPlan, float] = {}
    if form == "plain":
        times = {"library": measure(lambda w: row_product(work.x, w, LIBRARY), weights)}
        charged[LIBRARY] = times["library"]
    else:
        times = {"apart": measure(lambda w: work.apart(w, plain), weights)}
    for plan in candidates(n, k, rows, form):
        try:
            got = work.fused(weights[-1], plan).float()
            us = measure(lambda w, plan=plan: work.fused(w, plan), weights)
        except OutOfResources:
            continue
        got = got.sum(0) if got.dim() == 3 else got
        wrong = float((got - expected).norm() / expected.norm())
        if not wrong < 1e-2:
            raise SystemExit(f"{plan} is wrong for {rows} rows, {form} {n}x{k}: {wrong:.2g}")
        charged[plan] = us + (plan.splits - 1) * n * 4 / READER_BYTES_PER_US / (1 if n <= 4096 else 16)
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
    for form, n, k in shapes():
        for rows in options.rows:
            if time.time() - began > options.seconds:
                print(f"no time left for {form} {n}x{k}, {rows} rows", flush=True)
                continue
            wide = 2 * n if form == "gated" else n
            plain = plans.get(f"plain {wide}x{k}", {}).get(str(rows))
            best, times = tune(form, n, k, rows, RowPlan(**plain) if plain else LIBRARY)
            plans.setdefault(f"{form} {n}x{k}", {})[str(rows)] = asdict(best)
            rounded = {f"{kind}_us": round(us, 2) for kind, us in times.items()}
            floor = round(wide * k * 2 / bandwidth / 1e3, 2)
            figures.append({"form": form, "shape": f"{n}x{k}", "rows": rows, "floor_us": floor, **rounded})
            print(*figures[-1].items(), *asdict(best).values(), flush=True)
        torch.cuda.empty_cache()
    record = {**provenance(), "read_gb_per_s": round(bandwidth), "plans": plans, "figures": figures}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {options.out} after {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
