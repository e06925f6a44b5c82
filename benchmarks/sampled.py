"""What sampling costs: steps and rounds with temperature, top-p and top-k beside greedy ones, in one run.

    python benchmarks/sampled.py --out benchmarks/results/sampled-h200.json

Random weights of the Qwen3.5 geometries, as in `decode.py`. Their logits are flatter than those of trained models, so
that top-p alone cuts among many ids: the harder case.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import need_gpu, positive
from benchmarks.decode_bench import Bench
from benchmarks.decode_setup import GREEDY, cache_of, random_model
from benchmarks.geometries import GEOMETRIES
from benchmarks.gpu_timing import provenance
from nextn.engine.sampling import SamplingParams

CONTEXT, K = 1024, 3


@dataclass(frozen=True)
class Kind:
    """A kind of sampling by name."""

    name: str
    params: SamplingParams


KINDS = (
    Kind("greedy", GREEDY),
    Kind("temperature 0.7", SamplingParams(temperature=0.7)),
    Kind("temperature 0.7, top_p 0.95", SamplingParams(temperature=0.7, top_p=0.95)),
    Kind("temperature 0.7, top_k 20, top_p 0.8", SamplingParams(temperature=0.7, top_k=20, top_p=0.8)),
)


@torch.inference_mode()
def rows_of(geometry: str, batch: int) -> list[dict[str, Any]]:
    """A row a kind of sampling."""
    torch.manual_seed(0)
    model = random_model(GEOMETRIES[geometry])
    bench = Bench(model, cache_of(model, batch, CONTEXT, K + 1), batch, CONTEXT)
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        step, round_ = (bench.time(k, params=kind.params) for k in (0, K))
        row = {"geometry": geometry, "batch": batch, "draft_tokens": K, "sampling": kind.name}
        row |= {"step_ms": round(step, 4), "round_ms": round(round_, 4)}
        first = rows[0] if rows else row
        row |= {f"{what}_ratio": round(row[f"{what}_ms"] / first[f"{what}_ms"], 3) for what in ("step", "round")}
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", nargs="+", default=["4b", "0.8b"], choices=list(GEOMETRIES))
    parser.add_argument("--batch", nargs="+", type=positive, default=[1, 8])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    need_gpu()
    rows: list[dict[str, Any]] = []
    for geometry in options.geometry:
        for batch in options.batch:
            rows += rows_of(geometry, batch)
            torch.cuda.empty_cache()
            options.out.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
