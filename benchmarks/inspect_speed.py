"""Time `nextn inspect` as a user runs it: a fresh process on a folder of 100 shards with a head of 1,553 tensors.

    python benchmarks/inspect_speed.py --out benchmarks/results/inspect-speed.json

Three folders are built as sparse files: the head alone in 100 shards, the same with a trunk of 60 layers of 512 experts
(92,160 expert tensors), and that one quantised, with a list of 1,800 entries. Wall time counts from starting Python to
its exit, processor time is what the process itself used, memory its peak resident size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks.command_line import PRINTED
from nextn import __version__
from tests.fixtures import Entry, Folder, checkpoint, qwen3_5_moe

SHARDS = 100
RUNS = 7


def spread(tensors: dict[str, Entry]) -> dict[str, dict[str, Entry]]:
    """Deal tensors out to shards in order."""
    shards: dict[str, dict[str, Entry]] = {}
    for at, (key, entry) in enumerate(tensors.items()):
        number = at * SHARDS // len(tensors) + 1
        shards.setdefault(f"model-{number:05d}-of-{SHARDS:05d}.safetensors", {})[key] = entry
    return shards


def folder(trunk_layers: int, quantised: bool) -> Folder:
    made = checkpoint(qwen3_5_moe(experts=512, layers=60))
    tensors = {k: e for shard in made.shards.values() for k, e in shard.items()}
    for layer in range(trunk_layers):
        for expert in range(512):
            for part in ("gate", "up", "down"):
                key = f"model.language_model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                tensors[key] = ("U8", (512, 1024))
    if quantised:
        entries = [f"model.language_model.layers.{i}.{m}" for i in range(60) for m in (f"part_{n}" for n in range(30))]
        made.config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": [*entries, "mtp*"],
        }
    made.shards = spread(tensors)
    return made


def measure(root: Path) -> dict[str, float]:
    """Median wall and processor time and peak memory of `RUNS` runs after one that warms the file cache."""
    program = (
        "import json, resource, subprocess, sys, time\nstart = time.perf_counter()\n"
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)\nwall = time.perf_counter() - start\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([done.returncode, wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))"
    )
    command = [sys.executable, "-c", program, sys.executable, "-m", "nextn.cli", "inspect", str(root), "--json"]
    runs = []
    for run in range(RUNS + 1):
        code, *figures = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        assert code == 0, f"inspect ended with {code}"
        if run:
            runs.append(figures)
    walls, processor, peaks = zip(*runs, strict=True)
    return {
        "wall_s": round(median(walls), 3),
        "wall_least_s": round(min(walls), 3),
        "processor_s": round(median(processor), 3),
        "peak_mib": round(max(peaks), 1),
    }


def imports() -> float:
    """Seconds to import what the command needs, in a fresh process."""
    program = (
        "import time; t = time.perf_counter(); import nextn.cli, nextn.inspect.command; print(time.perf_counter() - t)"
    )
    runs = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
        for _ in range(RUNS)
    ]
    return round(median(runs), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=PRINTED)
    options = parser.parse_args()
    results: dict[str, object] = {
        "date": date.today().isoformat(),
        "nextn": __version__,
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "import_s": imports(),
    }
    with tempfile.TemporaryDirectory() as room:
        for name, layers, quantised in (("head", 0, False), ("head and trunk", 60, False), ("quantised", 60, True)):
            made = folder(layers, quantised)
            root = made.write(Path(room) / name.replace(" ", "_"))
            count = sum(len(s) for s in made.shards.values())
            results[name] = {"tensors": count, "shards": len(made.shards)} | measure(root)
    text = json.dumps(results, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
