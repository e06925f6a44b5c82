"""How many columns of a state a program of the delta step should take, and how many warps: whole forwards timed.

    python benchmarks/delta_programs.py --out benchmarks/results/delta-programs-h200.json

The kernels of a Qwen3.5 geometry in order, in one graph under dependent launch (`decode_chain.py`), with each setting
in turn; `nextn.kernels.delta_triton.program_of` holds the rule that was read off.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import PRINTED, need_gpu, positive
from benchmarks.decode_chain import Chain
from benchmarks.geometries import GEOMETRIES
from benchmarks.gpu_timing import captured, median_ms, provenance
from nextn.kernels import delta_triton
from nextn.kernels.row_plans import measured_plans

CONTEXT = 1024
SETTINGS = ((32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4))
"""Columns, warps."""
CASES = ((1, 1), (8, 1), (32, 1), (1, 4), (2, 4), (4, 4), (8, 4), (32, 4))
"""Sequences, rows of each."""


@dataclass(frozen=True)
class Job:
    """A forward to compile."""

    geometry: str
    batch: int
    rows: int
    setting: tuple[int, int]

    def chain(self, layers: int | None = None) -> Chain:
        g = GEOMETRIES[self.geometry]
        return Chain(replace(g, layers=layers or g.layers), self.batch, self.rows, CONTEXT, measured_plans())


def use(setting: tuple[int, int]) -> None:
    """Let every delta step have this setting."""
    delta_triton.program_of = lambda batch, v_heads: setting


@torch.inference_mode()
def compile_job(job: Job) -> None:
    """Run every kernel of a forward once on four layers, which leaves their binaries in Triton's cache on disk."""
    use(job.setting)
    job.chain(4).forward()


@torch.inference_mode()
def rows_of(name: str, batch: int, rows: int) -> dict[str, Any]:
    """Milliseconds of a forward by setting."""
    chosen = delta_triton.program_of(batch, GEOMETRIES[name].v_heads)
    chain = Job(name, batch, rows, chosen).chain()
    graphs = {}
    for setting in SETTINGS:
        use(setting)
        graphs[setting] = captured(chain.forward)
    # In turn and twice, so that a clock that drifts does not favour one.
    times = [{s: median_ms(graph) for s, graph in graphs.items()} for _ in range(2)]
    ms = {"x".join(map(str, s)): round((times[0][s] + times[1][s]) / 2, 4) for s in SETTINGS}
    case = {"geometry": name, "batch": batch, "rows": rows, "heads": batch * GEOMETRIES[name].v_heads}
    return case | {"in_use": "x".join(map(str, chosen)), "forward_ms": ms}


def all_of(names: list[str]) -> Iterator[dict[str, Any]]:
    """A row a geometry, batch and rows."""
    rule = delta_triton.program_of
    for name in names:
        for batch, rows in CASES:
            delta_triton.program_of = rule
            yield rows_of(name, batch, rows)
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", nargs="+", choices=sorted(GEOMETRIES), default=["0.8b", "4b"])
    parser.add_argument("--jobs", type=positive, default=12, help="processes that compile")
    parser.add_argument("--out", type=Path, help=PRINTED)
    options = parser.parse_args()
    need_gpu()
    jobs = [Job(name, *case, setting) for name in options.geometry for case in CASES for setting in SETTINGS]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_job, jobs))
    found = []
    for row in all_of(options.geometry):
        found.append(row)
        print(json.dumps(row), flush=True)
    text = json.dumps({**provenance(), "context": CONTEXT, "rows": found}, indent=1) + "\n"
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
