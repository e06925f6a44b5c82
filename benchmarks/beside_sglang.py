"""Run nextn's decode benchmark and SGLang's engine one after the other on one machine, and record the pair.

    python benchmarks/beside_sglang.py DIR --geometry 4b --out benchmarks/results/pair-h200.json

DIR holds SGLang 0.5.17 packed for offline use with its own benchmark: a ``run.sh`` that takes ``4b:mtp:SECONDS`` and
logs a line ``ROW {json}`` a batch size to ``/tmp/o/log_4b_mtp.txt`` as it goes. Both use the geometry's shapes with
random weights in bf16, K = 3, greedy; SGLang's attention runs on Triton.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_timing import provenance

HERE = Path(__file__).parent
RESULTS = Path("/tmp/o")
"""Where SGLang's benchmark leaves its own results."""


def ours(geometry: str, batches: list[int]) -> dict[int, dict[str, Any]]:
    """Rows of decode.py by batch size, in a process of its own."""
    out = Path("/tmp/nextn-decode.json")
    command = [sys.executable, str(HERE / "decode.py"), "--geometry", geometry, "--out", str(out), "--batch"]
    subprocess.run([*command, *map(str, batches)], check=True)
    return {row["batch"]: row for row in json.loads(out.read_text())["rows"] if row["draft_vocab"] is None}


def theirs(folder: Path, geometry: str, mode: str, seconds: int) -> dict[int, float]:
    """Milliseconds a step or NEXTN iteration by batch size, for the sizes that it reached in the time given."""
    subprocess.run(["bash", str(folder / "run.sh"), f"{geometry}:{mode}:{seconds}"], check=False)
    log = RESULTS / f"log_{geometry}_{mode}.txt"
    return logged(log.read_text()) if log.exists() else {}


def logged(text: str) -> dict[int, float]:
    """The step times of a log, by batch size."""
    rows = [json.loads(line[4:]) for line in text.splitlines() if line.startswith("ROW {")]
    return {row["bs"]: round(row["step_ms"], 4) for row in rows}


def pair(options: argparse.Namespace, geometry: str) -> list[dict[str, Any]]:
    """A row a batch size; the peer first, so that nothing else runs while either is measured."""
    peer = {mode: theirs(options.sglang, geometry, mode, options.seconds) for mode in options.modes}
    mine = ours(geometry, options.batch)
    return [
        {
            "geometry": geometry,
            "batch": batch,
            "draft_tokens": 3,
            "nextn_step_ms": mine[batch]["step_ms"],
            "sglang_step_ms": peer.get("base", {}).get(batch),
            "nextn_round_ms": mine[batch]["round_ms"],
            "sglang_round_ms": peer.get("mtp", {}).get(batch),
        }
        for batch in options.batch
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sglang", type=Path, metavar="DIR")
    parser.add_argument("--geometry", nargs="*", default=["4b"], choices=["0.8b", "4b"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--modes", nargs="*", default=["mtp"], choices=["base", "mtp"])
    parser.add_argument("--seconds", type=int, default=240, help="for each of SGLang's engines")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for geometry in options.geometry:
        rows += pair(options, geometry)
        result = {**provenance(), "sglang": "0.5.17, attention on Triton", "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
