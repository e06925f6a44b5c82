"""Time steps and rounds of Qwen3.5 geometries on a GPU against the bytes that they must move.

    python benchmarks/decode.py --out benchmarks/results/decode-h200.json

Random weights, bf16, `--context` cached positions a sequence. A *step* decodes one token without the head; a *round*
is verify, accept, extend and K - 1 draft steps, one CUDA graph each, replayed by the engine's own executor. Floors are
bytes over the read bandwidth measured in the same process: weights of the target's forward and of each head pass once,
recurrent states read and written once a layer and sequence, keys and values read once. Medians. A prompt of
`--context` tokens is measured too, by the host's clock.

Random weights accept nothing, so speed-up by accept length is measured with `Forced`, a runner of this file alone that
overrules how many draft tokens were accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decode_setup import CUDA, GREEDY, batch_of, cache_of, floor_ms, random_model
from geometries import GEOMETRIES, VOCAB, Geometry
from gpu_timing import bf16_tflops, provenance, read_gb_per_s
from torch import Tensor

from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.draft_vocab import DraftVocab
from nextn.engine.fused import FusedRunner
from nextn.engine.graphs import GraphExecutor
from nextn.engine.prefill import prefill
from nextn.engine.sampling import SamplingParams, SamplingState
from nextn.kernels.gdn_fused import installed
from nextn.models.blocks import Linear
from nextn.models.decoder import Decoder, Drafter
from nextn.models.load import build

TARGETS = {"4b": ((1.52, 1.25), (1.50, 1.25)), "9b": ((1.30, 1.15), (1.32, 1.15)), "0.8b": ((3.2, 1.8), (2.5, 1.6))}
"""Times floor at batch 1, (must, aim) for the step and for the round at K = 3."""
REDUCED = 32768
"""Ids of the reduced draft vocabulary."""
STARTED = "seconds from weights on the GPU to the first round: "


class Forced(FusedRunner):
    """Test-only: every sequence accepts exactly `accepted` draft tokens, whatever they are."""

    accepted = 0

    def accept_best(self, logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, accepted, broken = super().accept_best(logits, drafts)
        return tokens, accepted.fill_(self.accepted), broken


def measure(executor: GraphExecutor, batch: Batch, repeats: int, inner: int = 24) -> float:
    """Median milliseconds of a launch, rounds queued back to back as the engine queues them."""
    executor.load(batch)
    times = []
    for _ in range(repeats + 1):
        executor.load(batch)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        executor.launch()
        start.record()
        for _ in range(inner):
            executor.launch()
            executor.collect()
        end.record()
        executor.collect()
        end.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return statistics.median(times[1:])


class Bench:
    """One geometry at one batch size.

    Args:
        model, cache: random.
        size, context: sequences and their cached positions.
        capture_only: compile and capture, time nothing.

    Attributes:
        repeats: of which the median is taken.
    """

    def __init__(self, model: Decoder, cache: Cache, size: int, context: int, *, capture_only: bool = False) -> None:
        self.model, self.cache, self.size, self.context = model, cache, size, context
        self.capture_only = capture_only
        self.repeats = 7

    def time(
        self,
        k: int,
        *,
        head: bool = True,
        draft: Drafter | None = None,
        forced: int | None = None,
        params: SamplingParams = GREEDY,
        **options: Any,
    ) -> float:
        """Milliseconds of a round at K (0: a step)."""
        kind = FusedRunner if forced is None else Forced
        runner = kind(self.model, draft or self.model, self.cache, longest=self.context + 600, **options)
        if isinstance(runner, Forced):
            assert forced is not None
            runner.accepted = forced
        taken = list(self.cache.free_pages), list(self.cache.free_slots)
        executor = GraphExecutor(runner, self.cache)
        batch = batch_of(self.model, self.cache, self.size, self.context, k, head=head, params=params)
        if self.capture_only:
            executor.load(batch)
        ms = 0.0 if self.capture_only else measure(executor, batch, self.repeats)
        self.cache.free_pages, self.cache.free_slots = taken
        return ms

    def prefill(self, chunk: int) -> float:
        """Milliseconds of the host's clock from a prompt of `context` tokens to its first token and first draft."""
        runner = FusedRunner(self.model, self.model, self.cache, longest=self.context + 600)
        prompt = torch.randint(0, VOCAB, (self.context,)).tolist()
        params = [SamplingParams(temperature=0.0)]
        times = []
        for _ in range(2 if self.capture_only else self.repeats + 1):
            pages, slot = self.cache.take(self.context + 1)
            sampling = SamplingState.build(params, [prompt], vocab_size=VOCAB, device=CUDA)
            torch.cuda.synchronize()
            began = time.perf_counter()
            prefill(runner, self.cache, [prompt], [pages], [slot], sampling, k=1, chunk=chunk)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
            self.cache.give_back(pages, slot)
        return statistics.median(times[1:])


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


def row_of(g: Geometry, bench: Bench, k: int, gb_per_s: float, *, full: bool) -> list[dict[str, Any]]:
    """The measurements of one geometry, batch size and K: a row for the whole vocabulary, one for a reduced one."""
    model, size, context = bench.model, bench.size, bench.context
    step, round_ = bench.time(0), bench.time(k)
    memory = torch.cuda.max_memory_allocated() / 1e9
    step_floor, floor = (floor_ms(model, size, context, n, gb_per_s) for n in (0, k))
    if bench.capture_only:
        step = round_ = 1.0
    row: dict[str, Any] = {
        "geometry": g.name,
        "batch": size,
        "draft_tokens": k,
        "context": context,
        "step_ms": round(step, 4),
        "step_floor_ms": round(step_floor, 4),
        "step_ratio": round(step / step_floor, 3),
        "round_ms": round(round_, 4),
        "round_floor_ms": round(floor, 4),
        "round_ratio": round(round_ / floor, 3),
        "break_even_accept_length": round(round_ / step, 3),
        "draft_vocab": None,
        "peak_memory_gb": round(memory, 2),
    }
    rows = [row]
    if full:
        bench.repeats = 3
        verify = bench.time(k, head=False)
        row["head_share"] = round(1 - verify / round_, 3)
        vocab = DraftVocab.gather(model, range(REDUCED))
        reduced = bench.time(k, vocab=vocab)
        less = floor_ms(model, size, context, k, gb_per_s, REDUCED)
        rows.append(
            {
                **row,
                "draft_vocab": REDUCED,
                "round_ms": round(reduced, 4),
                "round_floor_ms": round(less, 4),
                "round_ratio": round(reduced / less, 3),
                "break_even_accept_length": round(reduced / step, 3),
                "head_share": round(1 - verify / reduced, 3) if reduced else None,
            }
        )
        row["exact_step_ms"], row["exact_round_ms"] = (round(bench.time(n, exact=True), 4) for n in (0, k))
        row["forced"] = []
        for accepted in range(k + 1):
            ms = bench.time(k, forced=accepted)
            gained = {"accept_length": accepted + 1, "round_ms": round(ms, 4)}
            row["forced"].append({**gained, "speed_up": round((accepted + 1) * step / ms, 3) if ms else None})
        torch.cuda.reset_peak_memory_stats()
        draft = build(model.config, dtype=torch.bfloat16, device=CUDA, kind=Drafter)
        for mine, theirs in ((draft.embed, model.embed), (draft.head, model.head)):
            if mine is not None and theirs is not None:
                mine.weight.data.copy_(theirs.weight)
        assert draft.mtp is not None
        assert model.mtp is not None
        draft.mtp.load_state_dict(model.mtp.state_dict())
        separate = bench.time(k, draft=draft)
        row["separate_draft_round_ms"] = round(separate, 4)
        row["separate_draft_peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return rows


@torch.inference_mode()
def rows_of(
    g: Geometry, options: argparse.Namespace, gb_per_s: float, tflops: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All measurements of one geometry: of decoding, and of a prompt."""
    model = random_model(g)
    rows = []
    prompt: dict[str, Any] = {}
    for size in options.batch:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        cache = cache_of(model, size, options.context, max(options.draft_tokens) + 1)
        bench = Bench(model, cache, size, options.context, capture_only=options.capture_only)
        if not prompt:
            prompt = prompt_row(g, bench, tflops)
            print(json.dumps(prompt), flush=True)
        for k in options.draft_tokens:
            rows += row_of(g, bench, k, gb_per_s, full=options.full)
            print(json.dumps(rows[-1]), flush=True)
        del cache, bench
    return rows, prompt


@torch.inference_mode()
def start_up(g: Geometry, context: int) -> float:
    """Seconds from weights on the GPU until a first round at K = 3, batch 1, has run."""
    model = random_model(g)
    torch.cuda.synchronize()
    began = time.perf_counter()
    cache = cache_of(model, 1, context, 4)
    executor = GraphExecutor(FusedRunner(model, model, cache, longest=context + 600), cache)
    executor.load(batch_of(model, cache, 1, context, 3))
    executor.launch()
    executor.collect()
    return time.perf_counter() - began


def start_ups(name: str, context: int) -> dict[str, float]:
    """Start-up in new processes, with an empty Triton cache and with the one that it left."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--geometry", name, "--context", str(context), "--start-up"]
        found = {}
        for state in ("cold", "warm"):
            env = {**os.environ, "TRITON_CACHE_DIR": folder}
            out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
            found[f"start_up_{state}_s"] = round(float(out.rsplit(STARTED, 1)[1]), 2)
    return found


def compared(ratio: float, goal: tuple[float, float] | None) -> str:
    """A ratio beside what it must be and aims to be."""
    return f"{ratio:.2f} x floor" + (f" (must {goal[0]:.2f}, aim {goal[1]:.2f})" if goal is not None else "")


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    known = row["batch"] == 1 and row["draft_tokens"] == 3 and row["draft_vocab"] is None
    goals = TARGETS[row["geometry"]] if known else (None, None)
    return (
        f"{row['geometry']:>5} batch {row['batch']:>2} K {row['draft_tokens']} draft vocab {row['draft_vocab']}: "
        f"step {row['step_ms']:.3f} ms, {compared(row['step_ratio'], goals[0])}; "
        f"round {row['round_ms']:.3f} ms, {compared(row['round_ratio'], goals[1])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", nargs="*", default=["0.8b", "4b", "9b"], choices=list(GEOMETRIES))
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--draft-tokens", nargs="*", type=int, default=[3])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--full", action="store_true", help="also exact decoding, forced acceptance, memory, vocabulary"
    )
    parser.add_argument("--start-ups", nargs="*", default=[], choices=list(GEOMETRIES), help="also time the start-up")
    parser.add_argument("--capture-only", action="store_true", help="compile and capture, time nothing")
    parser.add_argument("--start-up", action="store_true", help="print the start-up of one geometry and nothing else")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.start_up:
        print(STARTED, start_up(GEOMETRIES[options.geometry[0]], options.context))
        return
    gb_per_s = 1.0 if options.capture_only else read_gb_per_s()
    tflops = 1.0 if options.capture_only else bf16_tflops()
    rows: list[dict[str, Any]] = []
    prompts: list[dict[str, Any]] = []
    starts: dict[str, dict[str, float]] = {}
    for name in options.geometry:
        found, prompt = rows_of(GEOMETRIES[name], options, gb_per_s, tflops)
        rows, prompts = rows + found, [*prompts, prompt]
        torch.cuda.empty_cache()
        if name in options.start_ups:
            starts[name] = start_ups(name, options.context)
        record = {**provenance(), "read_gb_per_s": round(gb_per_s, 1), "start_up": starts}
        record |= {"bf16_tflops": round(tflops), "prefill": prompts}
        record["forced_by"] = "Forced.accept_best of benchmarks/decode.py, a test-only switch"
        if options.out is not None and not options.capture_only:
            options.out.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(line(row))


if __name__ == "__main__":
    main()
