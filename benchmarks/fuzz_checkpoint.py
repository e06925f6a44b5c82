"""Fuzz `open_checkpoint` and the report of `nextn inspect`: damaged headers, indexes, configs and GGUF files.

Every input must end in a report or in a `NextnError`, within a time limit and without a large allocation. Mutations
are at the byte level (flips, cuts, splices, insertions) and at the level of JSON values (hostile numbers, types,
nesting, duplicate keys). The seed is fixed; a failing input is kept under --keep with the traceback.

    python benchmarks/fuzz_checkpoint.py --inputs 100000 --out benchmarks/results/fuzz-inspect.json
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import random
import resource
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.command_line import PRINTED
from benchmarks.machine import processor
from nextn import __version__
from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.families.registry import FAMILIES, family_geometry
from nextn.inspect.examine import examine

KINDS = ("header", "index", "config", "gguf", "quantisation")
NUMBERS = (0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63, 2**64 - 1, 2**64, 10**30, 10**400, 1.5, 1e308, float("inf"))
TEXTS = (
    "",
    "\x00",
    "../../etc/passwd",
    "/etc/passwd",
    "mtp." + "9" * 5000,
    "\ud800",
    "\x1b[2J",
    "model.layers.-1.",
    "٣",
)
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "vocab_size": 128,
        "mtp_num_hidden_layers": 1,
    },
    "quantization_config": {"quant_method": "compressed-tensors", "ignore": ["re:mtp.*", "lm_head"]},
}
QUANTISATION: dict[str, Any] = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["mtp.layers.0*", "*"]},
}


class TimeLimitError(BaseException):
    """An input took longer than the limit; no handler for ordinary errors may catch it."""


def main() -> None:
    options = arguments()
    rng = random.Random(options.seed)
    work = Path(tempfile.mkdtemp(prefix="nextn-fuzz-", dir=options.work))
    signal.signal(signal.SIGALRM, _too_long)
    outcomes: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    slowest_ms, began = 0.0, time.monotonic()
    bases = {kind: base(kind) for kind in KINDS}
    try:
        for number in range(options.inputs):
            kind = KINDS[number % len(KINDS)]
            shutil.rmtree(work)
            work.mkdir()
            source = write(work, kind, mutate(rng, kind, bases[kind]))
            started = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, options.limit_s)
            try:
                examine(open_checkpoint(source)).as_json()
                outcomes[f"{kind}: report"] += 1
            except NextnError as error:
                if not error.what or error.exit_code not in (1, 2):
                    failures[f"{kind}: empty message"] += 1
                outcomes[f"{kind}: refused"] += 1
            except (Exception, TimeLimitError) as error:
                failures[f"{kind}: {type(error).__name__}"] += 1
                keep(options.keep, work, number, traceback.format_exc())
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            slowest_ms = max(slowest_ms, 1000 * (time.monotonic() - started))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    result = {
        "inputs": options.inputs,
        "seed": options.seed,
        "outcomes": dict(sorted(outcomes.items())),
        "failures": dict(sorted(failures.items())),
        "seconds": round(time.monotonic() - began, 1),
        "slowest_input_ms": round(slowest_ms, 1),
        "limit_ms": 1000 * options.limit_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "nextn": __version__,
        "python": platform.python_version(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    raise SystemExit(1 if failures else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--limit-s", type=float, default=2.0, help="time limit of one input")
    parser.add_argument("--work", help="folder for temporary files, best in memory")
    parser.add_argument("--keep", type=Path, help="folder that receives failing inputs")
    parser.add_argument("--out", type=Path, help=PRINTED)
    return parser.parse_args()


def _too_long(*_: object) -> None:
    raise TimeLimitError


def base(kind: str) -> Any:
    """The sound document that a kind's inputs are made from."""
    if kind == "gguf":
        return sound_gguf()
    if kind == "config":
        return CONFIG
    if kind == "quantisation":
        return QUANTISATION
    header = sound_header()
    if kind == "index":
        return {"weight_map": {key: "model.safetensors" for key in header if key != "__metadata__"}}
    return header


def sound_header() -> dict[str, Any]:
    """Header of a complete tiny Qwen3.5 MoE head with two target tensors."""
    family = next(f for f in FAMILIES if f.name == "qwen3_5_moe")
    shapes = {k: s for _, k, s, spec in family.expected(family_geometry(family, CONFIG), 1) if not spec.optional}
    shapes |= {"model.language_model.norm.weight": (64,), "lm_head.weight": (128, 64)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header


def sound_gguf() -> bytes:
    """A GGUF with metadata of every kind and the fusion tensors of a head."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("qwen35"),
        text("general.alignment") + struct.pack("<II", 4, 32),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 70) + text("token") * 70,
        text("scores") + struct.pack("<IIQ", 9, 6, 70) + bytes(280),
        text("nested") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQB", 0, 1, 7),
    ]
    sizes = {"block_count": 5, "nextn_predict_layers": 1, "embedding_length": 32, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8}
    for name, value in sizes.items():
        pairs.append(text(f"qwen35.{name}") + struct.pack("<II", 4, value))
    infos, at = [], 0
    for key, shape, size in (("eh_proj", (64, 32), 8192), ("enorm", (32,), 128), ("hnorm", (32,), 128)):
        form = f"<I{len(shape)}QIQ"
        infos.append(text(f"blk.4.nextn.{key}.weight") + struct.pack(form, len(shape), *shape, 0, at))
        at += size
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(at)


def mutate(rng: random.Random, kind: str, document: Any) -> bytes:
    """A damaged document: JSON values first (not for GGUF), then, often, bytes."""
    if kind == "gguf":
        data_start = document.rfind(b"hnorm.weight") + 64
        return mutate_bytes(rng, document[:data_start]) + document[data_start:]
    value = copy.deepcopy(document)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        value = mutate_value(rng, value)
    raw = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        raw = raw.replace(b"{", b"{" + raw[1:60].split(b",")[0] + b",", 1)
    return mutate_bytes(rng, raw) if rng.random() < 0.4 else raw


def mutate_value(rng: random.Random, value: Any) -> Any:
    """Replace, drop or add one value somewhere in a JSON document."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        action = rng.random()
        if action < 0.1:
            del value[key]
        elif action < 0.2 and isinstance(value, dict):
            value[rng.choice((*TEXTS, key + ".x", "mtp.layers.7.enorm.weight"))] = value[key]
        else:
            value[key] = mutate_value(rng, value[key])
        return value
    return hostile(rng)


def hostile(rng: random.Random) -> Any:
    chance = rng.random()
    if chance < 0.35:
        return rng.choice(NUMBERS)
    if chance < 0.6:
        return rng.choice(TEXTS)
    if chance < 0.7:
        nested: Any = []
        for _ in range(rng.choice((3, 50, 400))):
            nested = [nested]
        return nested
    if chance < 0.72:
        return [[]] * 20_000
    return rng.choice((None, True, False, [], {}, [None], {"a": {}}, "mtp", [2**40] * 40, float("nan")))


def mutate_bytes(rng: random.Random, raw: bytes) -> bytes:
    """A few flips, cuts, splices and insertions; 32- and 64-bit fields are hit whole now and then."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        action = rng.randrange(6)
        if action == 0 and data:
            data[at % len(data)] = rng.randrange(256)
        elif action == 1:
            del data[at : at + rng.choice((1, 2, 8, 100, len(data)))]
        elif action == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 64)))
        elif action == 3:
            start = rng.randrange(len(data) + 1)
            data[at:at] = data[start : start + rng.randrange(200)]
        elif action == 4:
            width = rng.choice((4, 8))
            limit = 1 << 8 * width
            data[at : at + width] = (rng.choice((0, 1, limit - 1, limit >> 1, 1 << 24, 100)) % limit).to_bytes(
                width, "little"
            )
        else:
            data[at:at] = rng.choice((b"[", b"{", b'"', b"\\ud800", b"\xff", b"NaN", b"1e999")) * rng.choice(
                (1, 3, 2000)
            )
    return bytes(data)


def write(work: Path, kind: str, document: bytes) -> Path:
    """Lay the document out as a checkpoint that is sound apart from it; what to open."""
    if kind == "gguf":
        (work / "model.gguf").write_bytes(document)
        return work / "model.gguf"
    (work / "config.json").write_bytes(document if kind == "config" else json.dumps(CONFIG).encode())
    if kind == "quantisation":
        (work / "hf_quant_config.json").write_bytes(document)
    if kind == "index":
        (work / "model.safetensors.index.json").write_bytes(document)
    header = document if kind == "header" else json.dumps(sound_header()).encode()
    size = sum(e["data_offsets"][1] - e["data_offsets"][0] for k, e in sound_header().items() if k[0] != "_")
    with (work / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    return work


def keep(folder: Path | None, work: Path, number: int, trace: str) -> None:
    if folder is not None:
        shutil.copytree(work, folder / str(number))
        (folder / str(number) / "traceback.txt").write_text(trace)


if __name__ == "__main__":
    main()
