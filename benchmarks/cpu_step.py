"""Where a CPU step's time goes: the share inside matrix products, for a 105 M-parameter hybrid with random weights.

    python benchmarks/cpu_step.py --out benchmarks/results/cpu-step.json

Steps without the head, rounds at K = 3, and steps whose products of one row are vector products (see
`nextn.kernels.linear`) are timed alternately, so that other load falls on all; the share is the time inside matrix
products over the wall time of the same profiled steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.command_line import PRINTED, positive, recorded
from benchmarks.machine import processor
from nextn.engine.engine import Engine, Request
from nextn.engine.params import SamplingParams
from nextn.kernels import linear
from nextn.models.config import decoder_config
from nextn.models.decoder import Decoder
from nextn.models.load import build

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 2048,
    "vocab_size": 16384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 2048,
}
PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv"})


def random_model() -> Decoder:
    torch.manual_seed(0)
    model = build(decoder_config(CONFIG), dtype=torch.float32, device=torch.device("cpu"))
    for param in model.parameters():
        param.normal_(0, 0.02)
    return model


def forward_ms(model: Decoder, k: int, count: int) -> float:
    """Milliseconds of one step (k = 0) or round, over `count` of them after a prompt of 128 tokens."""
    engine = Engine(model, draft_tokens=k)
    request = Request(list(range(100, 228)), SamplingParams(temperature=0.0, max_tokens=count))
    sequence = None
    for news in engine.rounds([request]):
        sequence = news[0][0]
    assert sequence is not None
    return engine.stats.decode_seconds / len(sequence.rounds) * 1e3


def product_share(model: Decoder, k: int, count: int) -> float:
    """Time inside matrix products over the wall time of the decoding."""
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        engine = Engine(model, draft_tokens=k)
        request = Request([5], SamplingParams(temperature=0.0, max_tokens=count))
        for _ in engine.rounds([request]):
            pass
    inside = sum(e.self_cpu_time_total for e in traced.key_averages() if e.key in PRODUCTS)
    return inside / 1e6 / (engine.stats.decode_seconds + engine.stats.prefill_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=positive, default=40)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--out", type=Path, help=PRINTED)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    model = random_model()
    usual = linear.SMALL_WEIGHT
    times: dict[tuple[int, int], list[float]] = {(0, usual): [], (3, usual): [], (0, sys.maxsize): []}
    for turn in range(options.repeats + 1):
        for (k, small), found in times.items():
            linear.SMALL_WEIGHT = small
            ms = forward_ms(model, k, options.count)
            found += [ms] if turn else []  # the first turn warms up
    linear.SMALL_WEIGHT = usual
    step, round_, vector = (statistics.median(found) for found in times.values())
    result = {
        "what": "105 M-parameter hybrid, random weights, float32, batch 1, context 128",
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "load_average_at_start": round(load, 2),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": recorded(),
        "step_ms": round(step, 2),
        "step_of_vector_products_ms": round(vector, 2),
        "round_k3_ms": round(round_, 2),
        "break_even_accept_length": round(round_ / step, 3),
        "product_share_of_step": round(product_share(model, 0, options.count), 3),
        "product_share_of_round": round(product_share(model, 3, options.count), 3),
        "weights_gb_per_s_of_step": round(sum(p.numel() * 4 for p in model.parameters()) / step / 1e6, 1),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
