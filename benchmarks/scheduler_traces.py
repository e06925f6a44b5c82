"""Run many random scheduler traces (tests/engine/traces.py) and record how many gave every request its own tokens.

    python benchmarks/scheduler_traces.py --traces 10000 --out benchmarks/results/scheduler-traces.json

Runs until so many are done or --minutes have passed. The record always holds the true number: it is written anew after
every 100 traces, where --out names a file. A trace that fails is named by its seed, and `run_trace(seed)` repeats it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
import traceback
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import PRINTED, positive, recorded
from tests.engine.traces import run_trace


def attempt(seed: int) -> dict[str, Any]:
    """One trace's counts, or what went wrong."""
    torch.set_num_threads(1)
    started = time.process_time()
    try:
        found: dict[str, Any] = asdict(run_trace(seed))
    except Exception as error:
        found = {"error": "".join(traceback.format_exception_only(error)).strip()}
    return {"seed": seed, "seconds": time.process_time() - started, **found}


class Totals:
    """Sums over traces, and those that failed."""

    def __init__(self) -> None:
        self.traces = 0
        self.failed: list[dict[str, Any]] = []
        self.sums: Counter[str] = Counter()
        self.seconds = 0.0

    def add(self, found: dict[str, Any]) -> None:
        self.traces += 1
        self.seconds += found["seconds"]
        if "error" in found:
            self.failed.append({"seed": found["seed"], "error": found["error"]})
            return
        for name in ("requests", "tokens", "rounds", "accepted", "pauses", "cancelled"):
            self.sums[name] += found[name]
        self.sums["traces_with_several_draft_lengths"] += len(found["lengths"]) > 1
        self.sums["traces_with_pauses"] += found["pauses"] > 0

    def as_json(self) -> dict[str, Any]:
        return {
            "traces": self.traces,
            "failed": self.failed,
            **self.sums,
            "processor_seconds": round(self.seconds, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=1000, help="first seed")
    parser.add_argument("--traces", type=positive, default=10000)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--jobs", type=positive, default=1, help="processes that share the seeds")
    parser.add_argument("--out", type=Path, help=PRINTED)
    options = parser.parse_args()
    totals, started = Totals(), time.monotonic()

    def record() -> str:
        out = {
            "what": "random scheduler traces in float64; every request compared with itself alone",
            "command": recorded(),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{platform.machine()} CPU, {options.jobs} at once, of one thread",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            **totals.as_json(),
            "wall_seconds": round(time.monotonic() - started, 1),
        }
        text = json.dumps(out, indent=1) + "\n"
        if options.out is not None:
            options.out.write_text(text)
        return text

    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for found in pool.imap(attempt, range(options.first, options.first + options.traces)):
            totals.add(found)
            if totals.traces % 100 == 0:
                record()
            if time.monotonic() - started > 60 * options.minutes:
                break
        pool.terminate()
    print(record())


if __name__ == "__main__":
    main()
