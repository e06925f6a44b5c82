"""Time of a training step over the target's own forward, and its peak memory, at a real model's size.

``python -m benchmarks.train_step --out FILE.json`` on one GPU: Qwen3.5-4B's geometry with random weights, packed
tokens, K = 3, KL over the full vocabulary and over 32,768 ids. The forward that a step is compared with includes the
target's logits, made in chunks as large as training's. By arithmetic alone the quotients are 2.17 and 1.38.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command_line import RESULTS, need_gpu
from benchmarks.geometries import GEOMETRIES, VOCAB, Geometry
from nextn.checkpoint.source import Checkpoint
from nextn.models.config import decoder_config
from nextn.models.decoder import Decoder
from nextn.models.load import build
from nextn.train.config import load_config
from nextn.train.layout import Layout
from nextn.train.losses import FUSED_CHUNK_LOGITS, LossSpec
from nextn.train.packing import Document, PackedBatch, pack
from nextn.train.processes import Processes
from nextn.train.start import Start
from nextn.train.step import HeadStep
from nextn.train.unroll import head_unroll, target_states


def config_of(size: Geometry) -> dict[str, Any]:
    """config.json of a geometry."""
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": size.hidden,
        "intermediate_size": size.inter,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": VOCAB,
        "linear_num_key_heads": size.k_heads,
        "linear_num_value_heads": size.v_heads,
        "linear_key_head_dim": size.gdn_dim,
        "linear_value_head_dim": size.gdn_dim,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
    }


def random_model(size: Geometry, device: torch.device) -> Decoder:
    """Random weights of a plausible spread, in bfloat16."""
    model = build(decoder_config(config_of(size)), dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02, generator=generator)
        else:
            parameter.zero_()
    return model


def batch_of(tokens: int, documents: int, device: torch.device) -> PackedBatch:
    length = tokens // documents
    ids = torch.randint(0, VOCAB, (documents, length), generator=torch.Generator().manual_seed(1)).tolist()
    return pack([Document(row, [True] * length) for row in ids], tokens).to(device)


@torch.no_grad()
def forward(model: Decoder, batch: PackedBatch) -> Tensor:
    """The target's forward with its logits; returns a number of each row, so that nothing can be left out."""
    states = target_states(model, batch, Layout(batch.documents))
    rows = FUSED_CHUNK_LOGITS // VOCAB // 16 * 16
    return torch.cat([model.logits(part).amax(-1) for part in states.teacher[0].split(rows)])


def timed(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median milliseconds of `repeats` calls after three, and the peak memory beyond what was held, in GB."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    peak = (torch.cuda.max_memory_allocated() - held) / 1e9
    return {"median_ms": sorted(times)[len(times) // 2], "peak_gb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=GEOMETRIES, default="4b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    need_gpu()
    device = torch.device("cuda")
    model = random_model(GEOMETRIES[given.size], device)
    batch = batch_of(given.tokens, given.documents, device)
    base = timed(lambda: forward(model, batch), given.repeats)
    rows: list[dict[str, Any]] = [{"what": "target forward with logits", **base}]
    assert model.mtp is not None
    model.mtp.float()
    unroll = head_unroll(model).requires_grad_(True)
    begun = Start(Checkpoint("random", None, {}, {}), model, unroll, {}, "split")
    config = load_config(
        None, ["data=none", f"unroll={given.steps}", "loss=kl", f"batch_tokens={given.tokens}", "lr=1e-6"]
    )
    for name, vocab in (("full vocabulary", None), ("32,768 ids", torch.arange(32768, device=device))):
        step = HeadStep(begun, config, Processes(0, 1, device), LossSpec("kl", config.step_weights, vocab=vocab))
        figures = timed(lambda step=step: step([(batch, None)]), given.repeats)  # type: ignore[misc]
        rows.append(
            {"what": f"training step, {name}", **figures, "over_forward": figures["median_ms"] / base["median_ms"]}
        )
    report = {
        "machine": f"{torch.cuda.get_device_name(device)}, {platform.machine()}",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks.train_step --size {given.size} --tokens {given.tokens}"
        f" --out {RESULTS}/{given.out.name}",
        "documents": given.documents,
        "draft_steps": given.steps,
        "rows": rows,
    }
    given.out.write_text(json.dumps(report, indent=2) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
