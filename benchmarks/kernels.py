"""Check the kernels at real shapes and time each against the bytes that it must move, then a whole forward.

    python benchmarks/kernels.py [--geometry 0.8b 4b] [--batch 1 32] [--out benchmarks/results/kernels-h200.json]

Each kernel runs over the caches of all layers of its kind in one CUDA graph, so that no cache holds them. `floor_us` is
its bytes over the read bandwidth measured in the same process; kernels of a few microseconds are bound by latency.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from decode_chain import BF16, Chain
from geometries import GEOMETRIES, VOCAB
from gpu_timing import captured, median_ms, provenance, read_gb_per_s
from torch import Tensor

from nextn.kernels import (
    activation,
    activation_triton,
    attention,
    delta,
    delta_triton,
    norm,
    norm_triton,
    probs_triton,
    rope,
    rope_triton,
    tokens_triton,
)
from nextn.kernels.row_plans import measured_plans

TOLERANCE = 1e-2

Case = tuple[str, int, list[Callable[[], object]]]
"""A kernel, the bytes that one call must move, and calls over distinct caches."""


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def check(chain: Chain) -> dict[str, float]:
    """Distance of each fused kernel's result from its plain definition in float32, |difference| / |expected|."""
    g, m = chain.g, chain.batch * chain.rows
    full = next(layer for layer in chain.layers if layer.delta is None)
    linear = next(layer for layer in chain.layers if layer.delta is not None)
    x, stream = (torch.randn(m, g.hidden, dtype=BF16, device="cuda") for _ in range(2))
    errors = {}
    got = norm_triton.add_rms_norm(x, stream, chain.final, 1e-6)
    expected = norm.add_rms_norm(x.float(), stream.float(), chain.final, 1e-6)
    errors["add_rms_norm"] = max(distance(a, b) for a, b in zip(got, expected, strict=True))
    wide = torch.randn(2, m, 2 * g.inter, device="cuda")
    errors["silu_mul"] = distance(activation_triton.silu_mul(wide, dtype=BF16), activation.silu_mul(wide.sum(0)))

    width = g.products["attn_in"][0]
    mixed = torch.randn(2, m, width, device="cuda")
    out = chain.mix(full, mixed, False)
    stored = mixed.sum(0).to(BF16).float().view(chain.batch, chain.rows, width)
    q_width, kv_width = 2 * g.heads * g.head_dim, g.kv_heads * g.head_dim
    q, k, v = stored.split((q_width, kv_width, kv_width), -1)
    q, gate = q.view(chain.batch, chain.rows, g.heads, 2 * g.head_dim).chunk(2, -1)
    k, v = (t.view(chain.batch, chain.rows, g.kv_heads, g.head_dim) for t in (k, v))
    tables = tuple(t[chain.positions][:, :, None].float() for t in (chain.cos, chain.sin))
    q, k = rope.qk_norm_rope(q, k, chain.head_scale, chain.head_scale, 1e-6, (tables[0], tables[1]))
    pools = [pool.float() for pool in full.caches]
    at = attention.slots_of(chain.table, chain.positions, pools[0].shape[1])
    attention.write_kv(k, v, pools[0], pools[1], at)
    errors["kv_pages"] = max(distance(a, b) for a, b in zip(full.caches, pools, strict=True))
    reach = chain.context + chain.rows
    attended = attention.paged_attention(q, pools[0], pools[1], chain.table, chain.positions, reach, g.head_dim**-0.5)
    errors["attention"] = distance(out, activation.sigmoid_mul(attended, gate).reshape(m, -1))

    assert linear.delta is not None
    assert linear.log is not None
    exact = replace(linear.delta, conv=linear.delta.conv.float())
    mixed = torch.randn(2, m, g.products["gdn_in"][0], device="cuda")
    ring, states = (t.clone().float() for t in linear.caches)
    log = delta.DeltaLog(*(t.clone() for t in (linear.log.k, linear.log.u, linear.log.g)))
    stored = mixed.sum(0).to(BF16).float()
    sequence = (chain.slot, chain.position, chain.pending)
    if chain.replay:
        expected = delta.delta_replay(exact, stored, ring, states, log, *sequence)
        out = delta_triton.delta_replay(linear.delta, mixed, *linear.caches, linear.log, *sequence)
        errors["delta_log"] = max(distance(getattr(linear.log, n), getattr(log, n)) for n in ("k", "u", "g"))
    else:
        expected = delta.delta_snapshots(exact, stored, ring, states, *sequence)
        out = delta_triton.delta_snapshots(linear.delta, mixed, *linear.caches, *sequence)
    errors["delta"] = distance(out, expected)
    errors["delta_states"] = distance(linear.caches[1], states)
    return errors


def cases(chain: Chain) -> Iterator[Case]:
    """The kernels of a layer."""
    g, m, rows = chain.g, chain.batch * chain.rows, chain.rows
    full = [layer for layer in chain.layers if layer.delta is None]
    linear = [layer for layer in chain.layers if layer.delta is not None]
    x, stream = (torch.randn(m, g.hidden, dtype=BF16, device="cuda") for _ in range(2))
    yield (
        "add_rms_norm",
        m * g.hidden * 2 * 4,
        [lambda: norm_triton.add_rms_norm(x, stream, chain.final, 1e-6, stream=stream, pdl=True)] * 24,
    )
    gate_up = torch.randn(2, m, 2 * g.inter, device="cuda")
    yield (
        "silu_mul of 2 partial sums",
        m * g.inter * (16 + 2),
        [lambda: activation_triton.silu_mul(gate_up, dtype=BF16, pdl=True)] * 24,
    )
    mixed = torch.randn(2, m, g.products["attn_in"][0], device="cuda")
    yield "qkv_to_pages", mixed.numel() * 4 + m * (g.heads + 2 * g.kv_heads) * g.head_dim * 2, [
        lambda layer=layer: rope_triton.qkv_to_pages(
            mixed, g.heads, chain.head_scale, chain.head_scale, 1e-6, chain.cos, chain.sin, chain.positions,
            chain.table, *layer.caches, q_step=2 * g.head_dim, pdl=True,
        ) for layer in full
    ]  # fmt: skip
    kv_bytes = chain.batch * chain.context * g.kv_heads * g.head_dim * 2 * 2
    yield (
        "qkv_to_pages and attention",
        mixed.numel() * 4 + kv_bytes,
        [lambda layer=layer: chain.mix(layer, mixed, True) for layer in full],
    )
    inputs = torch.randn(2, m, g.products["gdn_in"][0], device="cuda")
    copies = 2 if chain.replay else 1 + rows
    state_bytes = chain.batch * g.v_heads * g.gdn_dim**2 * 4 * copies
    yield (
        f"delta_{'replay' if chain.replay else 'snapshots'}",
        inputs.numel() * 4 + state_bytes,
        [lambda layer=layer: chain.mix(layer, inputs, True) for layer in linear],
    )


def token_cases(rows: int) -> Iterator[Case]:
    """Tokens from logits of `rows` rows of one sequence."""
    logits = torch.randn(rows, VOCAB, device="cuda") * 3
    one = torch.ones(1, dtype=torch.float64, device="cuda")
    off = torch.zeros(1, dtype=torch.bool, device="cuda")
    k = torch.full((1,), 50, device="cuda")
    probs = torch.softmax(logits, -1)
    draws = torch.rand(rows, dtype=torch.float64, device="cuda")
    size = logits.numel() * 4
    yield "argmax", size, [lambda: tokens_triton.argmax(logits, pdl=True)] * 8
    for name, top_k, top_p in (("temperature", None, None), ("top_p", None, one * 0.9), ("top_k", k, None)):
        yield (
            f"process, {name}",
            2 * size,
            [lambda top_k=top_k, top_p=top_p: probs_triton.process(logits, one, top_k, top_p, one * 0, off, pdl=True)]
            * 4,
        )
    yield "sample", size, [lambda: tokens_triton.sample(probs, draws, pdl=True)] * 8
    if rows > 1:
        drafts = probs[:-1].argmax(-1)[None]
        target, draft, numbers = probs[None], probs[None, :-1].contiguous(), draws[None]
        yield (
            "accept",
            2 * VOCAB * 4,
            [lambda: tokens_triton.accept(target, drafts, draft, numbers, numbers, pdl=True)] * 8,
        )


def forward_figures(chain: Chain, bandwidth: float) -> dict[str, Any]:
    """Times of a whole forward, and whether dependent launch leaves its result as it is."""
    caches = [
        t
        for layer in chain.layers
        for t in (*layer.caches, *((layer.log.k, layer.log.u, layer.log.g) if layer.log else ()))
    ]
    kept = [t.clone() for t in caches]
    results = []
    for pdl in (False, True):
        for cache, old in zip(caches, kept, strict=True):
            cache.copy_(old)
        results.append([t.clone() for t in (*chain.forward(pdl), *caches)])
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    del kept, results
    floor = (chain.weight_bytes() + chain.cache_bytes()) / bandwidth / 1e6
    plain, dependent = (median_ms(captured(lambda pdl=pdl: chain.forward(pdl)), inner=5) for pdl in (False, True))
    return {
        "floor_ms": round(floor, 3),
        "forward_ms": round(dependent, 3),
        "over_floor": round(dependent / floor, 3),
        "without_dependent_launch_ms": round(plain, 3),
        "equal_with_dependent_launch": same,
    }


@dataclass(frozen=True)
class Job:
    """One chain to build and measure."""

    geometry: str
    batch: int
    rows: int
    replay: bool
    context: int

    def chain(self, layers: int | None = None) -> Chain:
        g = GEOMETRIES[self.geometry]
        g = replace(g, layers=layers or g.layers)
        return Chain(g, self.batch, self.rows, self.context, measured_plans(), replay=self.replay)


def compile_job(job: Job, pdl: bool) -> None:
    """Run every kernel of a job once on four layers, which leaves their binaries in Triton's cache on disk."""
    chain = job.chain(layers=4)
    chain.forward(pdl)
    if not pdl:
        check(chain)
        return
    for _, _, calls in (*cases(chain), *token_cases(job.rows)):
        calls[0]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", nargs="+", choices=sorted(GEOMETRIES), default=["0.8b", "4b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels-h200.json"))
    options = parser.parse_args()
    jobs = [
        Job(name, batch, rows, replay, options.context)
        for name in options.geometry
        for batch in options.batch
        for rows, replay in ((1, True), (4, True), (4, False))
    ]
    began = time.time()
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_job, jobs + jobs, [False] * len(jobs) + [True] * len(jobs)))
    bandwidth = read_gb_per_s()
    record: dict[str, Any] = {**provenance(), "read_gb_per_s": round(bandwidth)}
    record |= {"checks": [], "kernels": [], "forward": []}
    print(f"compiled in {time.time() - began:.0f} s; {bandwidth:.0f} GB/s", flush=True)

    def time_all(where: dict[str, Any], found: Iterable[Case]) -> None:
        for kernel, size, calls in found:
            us = median_ms(captured(lambda calls=calls: [call() for call in calls]), repeats=7) * 1e3 / len(calls)
            row = {**where, "kernel": kernel, "us": round(us, 2), "floor_us": round(size / bandwidth / 1e3, 2)}
            record["kernels"].append(row)
            print(*row.values(), flush=True)

    failed = []
    for job in jobs:
        where = {"geometry": job.geometry, "batch": job.batch, "rows": job.rows}
        chain = job.chain()
        errors = check(chain)
        record["checks"].append({**where, "replay": job.replay, **{k: float(f"{v:.2g}") for k, v in errors.items()}})
        failed += [(where, k, v) for k, v in errors.items() if not v < TOLERANCE]
        time_all(where, [case for case in cases(chain) if job.replay or case[0].startswith("delta")])
        figures = {**where, "state": "replay" if job.replay else "snapshots", **forward_figures(chain, bandwidth)}
        record["forward"].append(figures)
        print(*figures.items(), flush=True)
        del chain
        torch.cuda.empty_cache()
    for rows in (1, 4):
        time_all({"rows": rows}, token_cases(rows))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for where, kernel, value in failed:
        print(f"WRONG: {kernel} at {where}: {value:.3g}")
    print(f"{len(jobs)} jobs in {time.time() - began:.0f} s")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
