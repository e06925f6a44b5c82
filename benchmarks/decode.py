"""Time steps and rounds of Qwen3.5 geometries on a GPU against the bytes that they must move.

    python benchmarks/decode.py --full --start-ups 0.8b 4b 9b --out benchmarks/results/decode-h200.json

Random weights, bf16, `--context` cached positions a sequence. A *step* decodes one token without the head; a *round*
is verify, accept, extend and K - 1 draft steps, one CUDA graph each, replayed by the engine's own executor, without
scheduler, stops and text; `--full` measures `nextn.generate` with all of them too. Floors are bytes over the read
bandwidth measured in the same process: weights of the target's forward and of each head pass once, recurrent states
read and written once a layer and sequence, keys and values read once. Medians. A prompt of `--context` tokens is
measured too, by the host's clock.

Random weights accept nothing, so speed-up by accept length is measured with `Forced`, a runner of decode_bench.py
alone that overrules how many draft tokens were accepted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import need_gpu, positive
from benchmarks.decode_bench import Bench
from benchmarks.decode_memory import Peak, native, reduced, released, separate
from benchmarks.decode_setup import cache_of, floor_ms, random_model
from benchmarks.geometries import GEOMETRIES, Geometry
from benchmarks.gpu_timing import bf16_tflops, provenance, read_gb_per_s
from benchmarks.product_speed import product_speed
from benchmarks.start_up import start_ups
from benchmarks.targets import Target, target
from nextn.kernels.gdn_fused import installed
from nextn.models.blocks import Linear

REDUCED = 32768
"""Ids of the reduced draft vocabulary."""


def prompt_row(g: Geometry, bench: Bench, tflops: float) -> dict[str, Any]:
    """The measurements of a prompt; its arithmetic is that of the products, once a token, and of the attention."""
    ms = bench.prefill(bench.context)
    pairs = bench.context * (bench.context + 1) / 2
    per_token = sum(m.weight.numel() for m in bench.model.modules() if isinstance(m, Linear))
    attention = sum(g.is_full(i) for i in range(g.layers)) + 1
    flops = 2 * per_token * bench.context + 4 * pairs * g.heads * g.head_dim * attention
    return {
        "geometry": g.name,
        "tokens": bench.context,
        "recurrence": "flash-linear-attention" if installed() else "plain",
        "ms": round(ms, 3),
        "tokens_per_s": round(bench.context / ms * 1e3),
        "share_of_peak": round(flops / ms / 1e9 / tflops, 3),
        "ms_in_chunks_of_512": round(bench.prefill(512), 3),
    }


def round_keys(found: Peak, floor: float, step: float) -> dict[str, Any]:
    """What a row says of a round."""
    return {
        "round_ms": round(found.ms, 4),
        "round_floor_ms": round(floor, 4),
        "round_ratio": round(found.ms / floor, 3),
        "break_even_accept_length": round(found.ms / step, 3),
        "peak_memory_gb": round(found.peak_gb, 2),
        "peak_memory_other_gb": round(found.other_gb, 3),
    }


def row_of(g: Geometry, bench: Bench, k: int, gb_per_s: float, *, full: bool) -> list[dict[str, Any]]:
    """The measurements of one geometry, batch size and K: a row for the whole vocabulary, one for a reduced one."""
    model, size, context = bench.model, bench.size, bench.context
    # Where nothing is timed, every time is 0.
    step = bench.time(0) or 1.0
    step_floor = floor_ms(model, size, context, 0, gb_per_s)
    whole = native(bench, k)
    common: dict[str, Any] = {
        "geometry": g.name,
        "batch": size,
        "draft_tokens": k,
        "context": context,
        "step_ms": round(step, 4),
        "step_floor_ms": round(step_floor, 4),
        "step_ratio": round(step / step_floor, 3),
    }
    row = {**common, "draft_vocab": None, **round_keys(whole, floor_ms(model, size, context, k, gb_per_s), step)}
    if not full:
        return [row]
    repeats, bench.repeats = bench.repeats, 3
    verify = bench.time(k, head=False)
    row["head_share"] = round(1 - verify / (whole.ms or 1.0), 3)
    fewer = reduced(bench, k, REDUCED)
    less = floor_ms(model, size, context, k, gb_per_s, REDUCED)
    row_reduced = {**common, "draft_vocab": REDUCED, **round_keys(fewer, less, step)}
    row_reduced["head_share"] = round(1 - verify / (fewer.ms or 1.0), 3)
    row["exact_step_ms"], row["exact_round_ms"] = (round(bench.time(n, exact=True), 4) for n in (0, k))
    row["forced"] = []
    for accepted in range(k + 1):
        ms = bench.time(k, forced=accepted)
        gained = {"accept_length": accepted + 1, "round_ms": round(ms, 4)}
        row["forced"].append({**gained, "speed_up": round((accepted + 1) * step / (ms or 1.0), 3)})
    apart = separate(bench, k)
    row["separate_draft_round_ms"] = round(apart.ms, 4)
    row["separate_draft_peak_memory_gb"] = round(apart.peak_gb, 2)
    row["separate_draft_peak_memory_other_gb"] = round(apart.other_gb, 3)
    row["separate_draft_extra_gb"] = round(apart.peak_gb - whole.peak_gb, 3)
    bench.repeats = repeats
    if not bench.capture_only:
        row |= product_speed(model, size, context, k)
    return [row, row_reduced]


@torch.inference_mode()
def rows_of(
    g: Geometry, options: argparse.Namespace, gb_per_s: float, tflops: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All measurements of one geometry: of decoding, and of a prompt."""
    model = random_model(g)
    rows = []

    def bench_of(size: int) -> Bench:
        cache = cache_of(model, size, options.context, max(options.draft_tokens) + 1)
        return Bench(model, cache, size, options.context, capture_only=options.capture_only)

    for size in options.batch:
        released()
        bench = bench_of(size)
        for k in options.draft_tokens:
            rows += row_of(g, bench, k, gb_per_s, full=options.full)
            print(json.dumps(rows[-1]), flush=True)
        del bench
    released()
    prompt = prompt_row(g, bench_of(1), tflops)
    print(json.dumps(prompt), flush=True)
    return rows, prompt


def compared(ratio: float, goal: Target | None) -> str:
    """A ratio beside what it must be and aims to be."""
    return f"{ratio:.2f} x floor" + (f" (must {goal.must:.2f}, aim {goal.aim:.2f})" if goal is not None else "")


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    return (
        f"{row['geometry']:>5} batch {row['batch']:>2} K {row['draft_tokens']} draft vocab {row['draft_vocab']}: "
        f"step {row['step_ms']:.3f} ms, {compared(row['step_ratio'], target(row, 'step'))}; "
        f"round {row['round_ms']:.3f} ms, {compared(row['round_ratio'], target(row, 'round'))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", nargs="+", default=["0.8b", "4b", "9b"], choices=list(GEOMETRIES))
    parser.add_argument("--batch", nargs="+", type=positive, default=[1, 8, 32])
    parser.add_argument("--draft-tokens", nargs="+", type=positive, default=[3])
    parser.add_argument("--context", type=positive, default=1024)
    parser.add_argument(
        "--full",
        action="store_true",
        help="also exact decoding, forced acceptance, a reduced vocabulary, a separate draft, and nextn.generate",
    )
    parser.add_argument("--start-ups", nargs="*", default=[], choices=list(GEOMETRIES), help="also time the start-up")
    parser.add_argument("--capture-only", action="store_true", help="compile and capture, time and record nothing")
    parser.add_argument("--out", type=Path, help="file for the record; without it only its rows are printed")
    options = parser.parse_args()
    need_gpu()
    gb_per_s = 1.0 if options.capture_only else read_gb_per_s()
    tflops = 1.0 if options.capture_only else bf16_tflops()
    rows: list[dict[str, Any]] = []
    prompts: list[dict[str, Any]] = []
    starts: dict[str, dict[str, Any]] = {}

    def record() -> None:
        found = {**provenance(), "read_gb_per_s": round(gb_per_s, 1), "start_up": starts}
        found |= {"bf16_tflops": round(tflops), "prefill": prompts}
        found["forced_by"] = "Forced.accept_best of benchmarks/decode_bench.py, a test-only switch"
        if options.out is not None and not options.capture_only:
            options.out.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")

    for name in options.geometry:
        found, prompt = rows_of(GEOMETRIES[name], options, gb_per_s, tflops)
        rows, prompts = rows + found, [*prompts, prompt]
        record()
    released()
    for name in options.start_ups:
        starts[name] = start_ups(name, options.context)
        print(name, starts[name], flush=True)
        record()
    for row in rows:
        print(line(row))


if __name__ == "__main__":
    main()
