"""Run nextn's decode benchmark and SGLang's engine one after the other on one machine, and record the pair.

    python benchmarks/beside_sglang.py DIR --geometry 4b 0.8b --modes mtp base --out benchmarks/results/pair-h200.json

DIR holds SGLang 0.5.17 packed for offline use with its own benchmark: a ``run.sh`` that takes ``4b:mtp:SECONDS`` and
logs a line ``ROW {json}`` a batch size to ``/tmp/o/log_4b_mtp.txt`` as it goes. Both use the geometry's shapes with
random weights in bf16, K = 3, greedy; SGLang's attention runs on Triton. What is timed of nextn is decode.py's loop of
launching and collecting rounds; of SGLang it is the whole offline engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command_line import need_gpu, positive
from benchmarks.gpu_timing import provenance

HERE = Path(__file__).parent
RESULTS = Path("/tmp/o")
"""Where SGLang's benchmark leaves its own results."""
CONTEXT = 640
"""Positions that nextn attends to: the middle of those of SGLang's benchmark, 512 to 768."""
NOTE = (
    "The geometries were run one after the other, each engine alone on its card. "
    f"nextn at {CONTEXT} positions of context, SGLang at 512 to 768."
)


def ours(geometry: str, batches: list[int]) -> dict[int, dict[str, Any]]:
    """Rows of decode.py by batch size, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "decode.json"
        command = [sys.executable, str(HERE / "decode.py"), "--geometry", geometry, "--context", str(CONTEXT)]
        subprocess.run([*command, "--out", str(out), "--batch", *map(str, batches)], check=True)
        rows = json.loads(out.read_text())["rows"]
    return {row["batch"]: row for row in rows if row["draft_vocab"] is None}


def theirs(folder: Path, geometry: str, mode: str, seconds: int) -> dict[int, float]:
    """Milliseconds a step or NEXTN iteration by batch size, for the sizes that it reached in the time given."""
    log = RESULTS / f"log_{geometry}_{mode}.txt"
    log.unlink(missing_ok=True)
    subprocess.run(["bash", str(folder / "run.sh"), f"{geometry}:{mode}:{seconds}"], check=False)
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
    parser.add_argument("--geometry", nargs="+", default=["4b"], choices=["0.8b", "4b"])
    parser.add_argument("--batch", nargs="+", type=positive, default=[1, 8, 32])
    parser.add_argument("--modes", nargs="+", default=["mtp"], choices=["base", "mtp"])
    parser.add_argument("--seconds", type=positive, default=240, help="for each of SGLang's engines")
    parser.add_argument("--note", default="", help="what else the record should say, such as other work on the machine")
    parser.add_argument("--out", type=Path, required=True, help="file for the record")
    options = parser.parse_args()
    need_gpu()
    if not (options.sglang / "run.sh").is_file():
        raise SystemExit(f"{options.sglang} holds no run.sh, so it is not SGLang packed with its benchmark.")
    rows: list[dict[str, Any]] = []
    for geometry in options.geometry:
        rows += pair(options, geometry)
        note = f"{NOTE} {options.note}".strip()
        result = {**provenance(), "sglang": "0.5.17, attention on Triton", "note": note, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
