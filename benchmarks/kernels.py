"""Check the kernels at real shapes and time each against the bytes that it must move, then a whole forward.

    python benchmarks/kernels.py --geometry 4b --out benchmarks/results/kernels-h200.json

Each kernel runs in one CUDA graph over inputs and caches of its own for every call, copies enough that the L2 cache
does not hold them from one replay to the next. Where that would take more than `CALLS` calls, of a kernel that moves a
few kilobytes, the row says `cached`: its data stay in the L2 cache, as they do in decoding. `floor_us` is the bytes of
a call over the read bandwidth measured in the same process; kernels of a few microseconds are bound by latency.
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
from torch import Tensor

from benchmarks.command_line import PRINTED, need_gpu, positive
from benchmarks.decode_chain import BF16, Chain, Layer
from benchmarks.geometries import GEOMETRIES, VOCAB
from benchmarks.gpu_timing import captured, median_ms, provenance, read_gb_per_s
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
from nextn.kernels.delta import DeltaLog
from nextn.kernels.row_plans import measured_plans

TOLERANCE = 1e-2
CALLS = 2048
"""Of a kernel in one graph, at most."""
L2_TIMES = 4
"""As many times the L2 cache is moved by a graph's calls, of which no more than half is moved twice."""


@dataclass(frozen=True)
class Case:
    """A kernel to time.

    Attributes:
        kernel: its name.
        moved_bytes: what one call must move.
        calls: each over data of its own.
    """

    kernel: str
    moved_bytes: int
    calls: list[Callable[[], object]]


def copies(moved_bytes: int, l2_bytes: int, at_once: int = 1) -> int:
    """How many sets of data to cycle through.

    Args:
        moved_bytes: of one call.
        l2_bytes: what they must not fit into; 0 asks for one set.
        at_once: calls that a set serves.
    """
    wanted = L2_TIMES * l2_bytes // (moved_bytes * at_once) + 1
    return max(1, min(wanted, CALLS // at_once))


def clones(tensor: Tensor, count: int) -> list[Tensor]:
    """The tensor and copies of it."""
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def layers_again(layers: list[Layer], count: int) -> list[Layer]:
    """The layers, and again with caches of their own until there are `count` sets."""
    found = list(layers)
    for _ in range(count - 1):
        for layer in layers:
            log = layer.log
            if log is not None:
                log = DeltaLog(log.k.clone(), log.u.clone(), log.g.clone())
            found.append(replace(layer, caches=tuple(t.clone() for t in layer.caches), log=log))
    return found


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


def cases(chain: Chain, l2_bytes: int) -> Iterator[Case]:
    """The kernels of a layer; for `l2_bytes` see `copies`."""
    g, m, rows = chain.g, chain.batch * chain.rows, chain.rows
    full = [layer for layer in chain.layers if layer.delta is None]
    linear = [layer for layer in chain.layers if layer.delta is not None]

    moved = m * g.hidden * 2 * 4
    x, stream = (torch.randn(m, g.hidden, dtype=BF16, device="cuda") for _ in range(2))
    count = copies(moved, l2_bytes)
    yield Case(
        "add_rms_norm",
        moved,
        [
            lambda x=x, s=s: norm_triton.add_rms_norm(x, s, chain.final, 1e-6, stream=s, pdl=True)
            for x, s in zip(clones(x, count), clones(stream, count), strict=True)
        ],
    )

    moved = m * g.inter * (16 + 2)
    gate_up = torch.randn(2, m, 2 * g.inter, device="cuda")
    yield Case(
        "silu_mul of 2 partial sums",
        moved,
        [
            lambda x=x: activation_triton.silu_mul(x, dtype=BF16, pdl=True)
            for x in clones(gate_up, copies(moved, l2_bytes))
        ],
    )

    mixed = torch.randn(2, m, g.products["attn_in"][0], device="cuda")
    moved = mixed.numel() * 4 + m * (g.heads + 2 * g.kv_heads) * g.head_dim * 2
    layers = layers_again(full, copies(moved, l2_bytes, len(full)))
    yield Case(
        "qkv_to_pages",
        moved,
        [
            lambda layer=layer, x=x: rope_triton.qkv_to_pages(
                x, g.heads, chain.head_scale, chain.head_scale, 1e-6, chain.cos, chain.sin, chain.positions,
                chain.table, *layer.caches, q_step=2 * g.head_dim, pdl=True,
            ) for layer, x in zip(layers, clones(mixed, len(layers)), strict=True)
        ],
    )  # fmt: skip

    moved = mixed.numel() * 4 + chain.batch * chain.context * g.kv_heads * g.head_dim * 2 * 2
    layers = layers_again(full, copies(moved, l2_bytes, len(full)))
    yield Case(
        "qkv_to_pages and attention",
        moved,
        [
            lambda layer=layer, x=x: chain.mix(layer, x, True)
            for layer, x in zip(layers, clones(mixed, len(layers)), strict=True)
        ],
    )

    inputs = torch.randn(2, m, g.products["gdn_in"][0], device="cuda")
    moved = inputs.numel() * 4 + chain.batch * g.v_heads * g.gdn_dim**2 * 4 * (2 if chain.replay else 1 + rows)
    layers = layers_again(linear, copies(moved, l2_bytes, len(linear)))
    yield Case(
        f"delta_{'replay' if chain.replay else 'snapshots'}",
        moved,
        [
            lambda layer=layer, x=x: chain.mix(layer, x, True)
            for layer, x in zip(layers, clones(inputs, len(layers)), strict=True)
        ],
    )


def token_cases(rows: int, l2_bytes: int) -> Iterator[Case]:
    """Tokens from logits of `rows` rows of one sequence; for `l2_bytes` see `copies`."""
    logits = torch.randn(rows, VOCAB, device="cuda") * 3
    one = torch.ones(1, dtype=torch.float64, device="cuda")
    off = torch.zeros(1, dtype=torch.bool, device="cuda")
    k = torch.full((1,), 50, device="cuda")
    draws = torch.rand(rows, dtype=torch.float64, device="cuda")
    size = logits.numel() * 4
    several = clones(logits, copies(size, l2_bytes))
    yield Case("argmax", size, [lambda x=x: tokens_triton.argmax(x, pdl=True) for x in several])
    for name, top_k, top_p in (("temperature", None, None), ("top_p", None, one * 0.9), ("top_k", k, None)):
        yield Case(
            f"process, {name}",
            2 * size,
            [
                lambda x=x, top_k=top_k, top_p=top_p: probs_triton.process(x, one, top_k, top_p, one * 0, off, pdl=True)
                for x in several
            ],
        )
    probs = [torch.softmax(x, -1) for x in several]
    yield Case("sample", size, [lambda p=p: tokens_triton.sample(p, draws, pdl=True) for p in probs])
    if rows > 1:
        drafts = probs[0][:-1].argmax(-1)[None]
        numbers = draws[None]
        pairs = [(p[None], p[None, :-1].contiguous()) for p in probs]
        yield Case(
            "accept",
            2 * VOCAB * 4,
            [lambda t=t, d=d: tokens_triton.accept(t, drafts, d, numbers, numbers, pdl=True) for t, d in pairs],
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
    for case in (*cases(chain, 0), *token_cases(job.rows, 0)):
        case.calls[0]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", nargs="+", choices=sorted(GEOMETRIES), default=["0.8b", "4b"])
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=positive, default=1024)
    parser.add_argument("--out", type=Path, help=PRINTED)
    options = parser.parse_args()
    need_gpu()
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
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    record: dict[str, Any] = {**provenance(), "read_gb_per_s": round(bandwidth), "l2_cache_bytes": l2_bytes}
    record |= {"checks": [], "kernels": [], "forward": []}
    print(f"compiled in {time.time() - began:.0f} s; {bandwidth:.0f} GB/s", flush=True)

    def time_all(where: dict[str, Any], found: Iterable[Case]) -> None:
        for case in found:
            replay = captured(lambda case=case: [call() for call in case.calls])
            us = median_ms(replay, repeats=7) * 1e3 / len(case.calls)
            floor = case.moved_bytes / bandwidth / 1e3
            row = {**where, "kernel": case.kernel, "us": round(us, 2), "floor_us": round(floor, 2)}
            if case.moved_bytes * len(case.calls) < L2_TIMES * l2_bytes:
                row["cached"] = True
            record["kernels"].append(row)
            print(*row.values(), flush=True)

    failed = []
    for job in jobs:
        where = {"geometry": job.geometry, "batch": job.batch, "rows": job.rows}
        chain = job.chain()
        errors = check(chain)
        record["checks"].append({**where, "replay": job.replay, **{k: float(f"{v:.2g}") for k, v in errors.items()}})
        failed += [(where, k, v) for k, v in errors.items() if not v < TOLERANCE]
        time_all(where, (case for case in cases(chain, l2_bytes) if job.replay or case.kernel.startswith("delta")))
        figures = {**where, "state": "replay" if job.replay else "snapshots", **forward_figures(chain, bandwidth)}
        record["forward"].append(figures)
        print(*figures.items(), flush=True)
        del chain
        torch.cuda.empty_cache()
    for rows in (1, 4):
        time_all({"rows": rows}, token_cases(rows, l2_bytes))
    text = json.dumps(record, indent=1) + "\n"
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)
    for where, kernel, value in failed:
        print(f"WRONG: {kernel} at {where}: {value:.3g}")
    print(f"{len(jobs)} jobs in {time.time() - began:.0f} s")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
