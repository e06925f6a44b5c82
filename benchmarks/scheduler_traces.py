"""Run many random scheduler traces (tests/engine/traces.py) and record how many gave every request its own tokens.

    python -m benchmarks.scheduler_traces --traces 10000 --out benchmarks/results/scheduler-traces.json

Runs until so many are done or --minutes have passed, and records the true number; a trace that fails is named by its
seed, and `run_trace(seed)` repeats it.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import traceback
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.engine.traces import run_trace


def run(first: int, traces: int, minutes: float) -> dict[str, Any]:
    """Counts over traces of the seeds from `first` on."""
    totals: Counter[str] = Counter()
    lengths: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    started, processor, done = time.monotonic(), time.process_time(), 0
    for seed in range(first, first + traces):
        if time.monotonic() - started > 60 * minutes:
            break
        try:
            outcome = run_trace(seed)
        except Exception as error:
            failed.append({"seed": seed, "error": "".join(traceback.format_exception_only(error)).strip()})
        else:
            for name in ("requests", "tokens", "rounds", "accepted", "pauses", "cancelled"):
                totals[name] += getattr(outcome, name)
            lengths["traces with several draft lengths"] += len(outcome.lengths) > 1
            lengths["traces with pauses"] += outcome.pauses > 0
        done += 1
        if done % 500 == 0:
            print(f"{done} traces, {len(failed)} failed", flush=True)
    return {
        "traces": done,
        "failed": failed,
        **totals,
        **lengths,
        "wall_seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=1000, help="first seed")
    parser.add_argument("--traces", type=int, default=10000)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scheduler-traces.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = run(options.first, options.traces, options.minutes)
    record = {
        "what": "random scheduler traces in float64; every request compared with itself alone",
        "command": f"python -m benchmarks.scheduler_traces --first {options.first} --traces {options.traces}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()} CPU, one thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "first_seed": options.first,
        **result,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
