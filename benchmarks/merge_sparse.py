"""Measure a merge into a base of 300 GB: seconds, bytes that reach the disk, peak memory.

    python benchmarks/merge_sparse.py --folder DIR --out benchmarks/results/merge-sparse.json

The base has the proportions of a large Qwen3.5 MoE; its files are sparse, so that they take no room. The head, of eight
experts, is real bytes. Three cases: a graft (shards linked), a replacement whose old head shares one shard
with the target (that shard is written anew), and a head in float32 that is cast on the way. Each runs as a process of
its own; bytes are what the kernel counts for that process (``/proc/self/io``), memory its high-water mark.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command_line import PRINTED, positive
from benchmarks.machine import processor
from nextn import __version__
from nextn.families.registry import family_geometry, find_family

CHILD = """
import json, sys, time
started = time.monotonic()
from nextn.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
print("MEASURED", json.dumps({
    "seconds": round(time.monotonic() - started, 3),
    "written_bytes": int(io["wchar"]),
    "to_disk_bytes": int(io["write_bytes"]),
    "peak_rss_bytes": 1024 * int(status["VmHWM"].split()[0]),
}))
"""


def config(experts: int) -> dict[str, Any]:
    """A Qwen3.5 MoE of 397B-A17B's proportions."""
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 248_320,
        "num_experts": experts,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
    }
    names = ["Qwen3_5MoeForConditionalGeneration"]
    return {"model_type": "qwen3_5_moe", "architectures": names, "tie_word_embeddings": False, "text_config": text}


def write_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], real: bool) -> None:
    """A safetensors file; sparse unless `real`, then with random bytes of plausible floats."""
    import numpy as np

    width = {"BF16": 2, "F32": 4}
    header: dict[str, Any] = {}
    at = 0
    for key, (dtype, shape) in tensors.items():
        nbytes = int(np.prod(shape)) * width[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        if not real:
            file.truncate(8 + len(raw) + at)
            return
        random = np.random.default_rng(0)
        for dtype, shape in tensors.values():
            values = random.standard_normal(int(np.prod(shape)), np.float32)
            file.write((values.view("<u4") >> 16).astype("<u2").tobytes() if dtype == "BF16" else values.tobytes())


def head_tensors(experts: int, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    declared = config(experts)
    family = find_family(declared)
    assert family is not None
    found = family.expected(family_geometry(family, declared), 1, experts="split")
    return {key: (dtype, shape) for _, key, shape, spec in found if not spec.optional}


def write_base(root: Path, total_bytes: int, shards: int, old: bool) -> None:
    """A base of `total_bytes` in as many files; with `old`, the last one also holds an old head."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config(8)))
    index: dict[str, str] = {}
    each = total_bytes // shards
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        rows = each // 2 // 4096 // 16
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            f"model.language_model.layers.{(number - 1) % 60}.mlp.experts.{number}_{i}.up_proj.weight": (
                "BF16",
                (rows, 4096),
            )
            for i in range(16)
        }
        if number == 1:
            tensors["model.language_model.embed_tokens.weight"] = ("BF16", (248_320, 4096))
        if old and number == shards:
            tensors |= head_tensors(8, "BF16")
        write_file(root / name, tensors, real=False)
        index |= dict.fromkeys(tensors, name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def measure(arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=True)
    line = next(x for x in done.stdout.splitlines() if x.startswith("MEASURED "))
    value: dict[str, Any] = json.loads(line.removeprefix("MEASURED "))
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=300)
    parser.add_argument("--shards", type=positive, default=100)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the sparse files")
    parser.add_argument("--out", type=Path, help=PRINTED)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=options.folder))
    total = int(options.gigabytes * 1e9)
    cases: dict[str, Any] = {}
    try:
        for name, old, dtype, extra in (
            ("graft", False, "BF16", []),
            ("replace, one shard rewritten", True, "BF16", ["--replace"]),
            ("graft, float32 head cast to bf16", False, "F32", []),
        ):
            base, head, out = work / "base", work / "head", work / "out"
            write_base(base, total, options.shards, old)
            head.mkdir()
            (head / "config.json").write_text(json.dumps(config(8)))
            write_file(head / "model.safetensors", head_tensors(8, dtype), real=True)
            cases[name] = {
                "head_bytes": (head / "model.safetensors").stat().st_size,
                **measure(["merge", str(base), str(head), str(out), *extra]),
            }
            print(name, cases[name])
            for folder in (base, head, out):
                shutil.rmtree(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    import numpy

    result = {
        "base_bytes": total,
        "shards": options.shards,
        "cases": cases,
        "nextn": __version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "cpu": processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "date": datetime.date.today().isoformat(),
    }
    text = json.dumps(result, indent=2) + "\n"
    if options.out is None:
        print(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
