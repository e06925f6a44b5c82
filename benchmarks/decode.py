"""Time steps and rounds of Qwen3.5 geometries on a GPU against the bytes that they must move.

    python benchmarks/decode.py --out benchmarks/results/decode-h200.json

Random weights, bf16, `--context` cached positions a sequence. A *step* decodes one token without the head; a *round*
is verify, accept, extend and K - 1 draft steps, one CUDA graph each, replayed by the engine's own executor. Floors are
bytes over the read bandwidth measured in the same process: weights of the target's forward and of each head pass once,
recurrent states read and written once a layer and sequence, keys and values read once. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from geometries import GEOMETRIES, VOCAB, Geometry
from gpu_timing import provenance, read_gb_per_s

from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.fused import FusedRunner
from nextn.engine.graphs import GraphExecutor, bucket_of
from nextn.engine.sampling import SamplingParams, SamplingState
from nextn.models.config import decoder_config
from nextn.models.decoder import Decoder
from nextn.models.load import build

PAGE = 64
TIED = {"0.8b": True, "4b": True, "9b": False}
CUDA = torch.device("cuda")


def config_of(g: Geometry) -> dict[str, Any]:
    """config.json of a geometry."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": g.hidden,
        "intermediate_size": g.inter,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "linear_num_key_heads": g.k_heads,
        "linear_num_value_heads": g.v_heads,
        "linear_key_head_dim": g.gdn_dim,
        "linear_value_head_dim": g.gdn_dim,
        "linear_conv_kernel_dim": 4,
        "vocab_size": VOCAB,
        "tie_word_embeddings": TIED[g.name],
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 4096,
    }


@torch.no_grad()
def random_model(g: Geometry) -> Decoder:
    """Weights that keep activations in range."""
    model = build(decoder_config(config_of(g)), dtype=torch.bfloat16, device=CUDA)
    for param in model.parameters():
        if param.dim() == 2:
            param.normal_(0, param.shape[1] ** -0.5)
        else:
            param.normal_(0, 0.1)
    return model


def batch_of(model: Decoder, cache: Cache, size: int, context: int, k: int) -> Batch:
    """Sequences with random tokens, `context` positions of random past."""
    pages, slots = zip(*(cache.take(context + 600) for _ in range(size)), strict=True)
    sampling = SamplingState.build(
        [SamplingParams(temperature=0.0)] * size, [[0]] * size, vocab_size=VOCAB, device=CUDA
    )
    # A batch with head states drafts; a step without the head has none.
    states = [torch.randn(size, 1, model.config.hidden, dtype=torch.bfloat16, device=CUDA) if k else None] * 2
    return Batch(
        lengths=torch.full((size,), context, device=CUDA),
        bonus=torch.randint(0, VOCAB, (size,), device=CUDA),
        drafts=torch.randint(0, VOCAB, (size, k), device=CUDA),
        draft_probs=None,
        committed=torch.ones(size, dtype=torch.int64, device=CUDA),
        table=torch.tensor(pages, device=CUDA),
        slots=torch.tensor(slots, device=CUDA),
        sampling=sampling,
        bound=context,
        head_out=states[0],
        head_hidden=states[1],
    )


def floors_ms(model: Decoder, size: int, context: int, k: int, gb_per_s: float) -> float:
    """Least time of a round at K (0: a step) by bytes."""
    c = model.config
    head = sum(p.numel() * p.element_size() for p in model.mtp.parameters()) if model.mtp is not None else 0
    output = model.output_weight.numel() * 2
    layers = sum(p.numel() * p.element_size() for p in model.layers.parameters())
    states = 2 * c.linear_layers * c.gdn_v_heads * c.gdn_k_dim * c.gdn_v_dim * 4
    kv = context * c.kv_heads * c.head_dim * 2 * 2
    moved = layers + output + size * (states + c.full_layers * kv) + k * (head + output + size * kv)
    return moved / gb_per_s / 1e6


def measure(executor: GraphExecutor, batch: Batch, repeats: int, inner: int) -> float:
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


@torch.inference_mode()
def rows_of(
    g: Geometry, batches: list[int], draft_tokens: list[int], context: int, gb_per_s: float
) -> list[dict[str, Any]]:
    """All measurements of one geometry."""
    model = random_model(g)
    rows = []
    for size in batches:
        k_most = max(draft_tokens)
        cache = Cache(
            model.config,
            pages=(bucket_of(size) + 2) * (-(-(context + 700) // PAGE)),
            page_size=PAGE,
            sequences=size + 2,
            rows=k_most + 1,
            dtype=torch.bfloat16,
            device=CUDA,
        )
        for pool in (cache.k, cache.v, cache.draft_k, cache.draft_v, cache.conv):
            pool.normal_(0, 0.5)
        cache.states.normal_(0, 0.1)
        runner = FusedRunner(model, model, cache, longest=context + 600)
        executor = GraphExecutor(runner, cache)
        step = None
        for k in (0, *draft_tokens):
            batch = batch_of(model, cache, size, context, k)
            torch.cuda.synchronize()
            began = time.perf_counter()
            executor.load(batch)
            torch.cuda.synchronize()
            capture_s = time.perf_counter() - began
            time_ms = measure(executor, batch, 7, 24)
            floor = floors_ms(model, size, context, k, gb_per_s)
            for row in range(size):
                cache.give_back(batch.table[row].tolist(), int(batch.slots[row]))
            if k == 0:
                step = (time_ms, floor, capture_s)
                continue
            assert step is not None
            rows.append(
                {
                    "geometry": g.name,
                    "batch": size,
                    "draft_tokens": k,
                    "context": context,
                    "step_ms": round(step[0], 4),
                    "step_floor_ms": round(step[1], 4),
                    "step_ratio": round(step[0] / step[1], 3),
                    "round_ms": round(time_ms, 4),
                    "round_floor_ms": round(floor, 4),
                    "round_ratio": round(time_ms / floor, 3),
                    "break_even_accept_length": round(time_ms / step[0], 3),
                    "draft_vocab": None,
                    "capture_s": round(capture_s, 2),
                    "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        del executor, runner, cache
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", nargs="*", default=["0.8b", "4b", "9b"], choices=list(GEOMETRIES))
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--draft-tokens", nargs="*", type=int, default=[3])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gb_per_s = read_gb_per_s()
    rows = []
    for name in options.geometry:
        torch.cuda.reset_peak_memory_stats()
        rows += rows_of(GEOMETRIES[name], options.batch, options.draft_tokens, options.context, gb_per_s)
        torch.cuda.empty_cache()
        result = {**provenance(), "read_gb_per_s": round(gb_per_s, 1), "rows": rows}
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['geometry']:>5} batch {row['batch']:>2} K {row['draft_tokens']}: step {row['step_ms']:.3f} ms "
            f"({row['step_ratio']:.2f} x floor), round {row['round_ms']:.3f} ms ({row['round_ratio']:.2f} x floor)"
        )


if __name__ == "__main__":
    main()
