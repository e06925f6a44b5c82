"""The fused runner does what the modules do: hidden states, caches, and whole decodes."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nextn.checkpoint.source import open_checkpoint
from nextn.engine import contexts
from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.contexts import Rows
from nextn.engine.engine import Engine
from nextn.engine.fused import FusedRunner
from nextn.engine.prefill import prefill
from nextn.engine.request import Request, Running
from nextn.engine.round import RoundResult, decode_round, draft_tokens, set_draft_tokens
from nextn.engine.runner import PlainRunner
from nextn.engine.sampling import SamplingParams, SamplingState
from nextn.kernels import attention_triton
from nextn.kernels.row_plans import RowPlan, RowPlans
from nextn.models.decoder import Decoder
from nextn.models.load import load_decoder
from tests.kernels.flash_linear_attention import stand_in
from tests.oracle.checkpoints import make_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "hidden_size": 64,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "qwen3": {"num_hidden_layers": 2, "head_dim": 32, "hidden_size": 64},
    "qwen2": {"num_hidden_layers": 2, "hidden_size": 64},
}
DEVICES = [("cpu", torch.float32), pytest.param("cuda", torch.float32, marks=pytest.mark.gpu)]


@functools.cache
def model(kind: str, device: str, dtype: torch.dtype) -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        made = make_checkpoint(Path(folder), kind, **SHAPES[kind])
        return load_decoder(open_checkpoint(made), dtype=dtype, device=torch.device(device))[0]


def cache_of(m: Decoder, rows: int, *, replay: bool) -> Cache:
    weight = m.embed.weight
    return Cache(
        m.config,
        pages=14,
        page_size=16,
        sequences=3,
        rows=rows,
        dtype=weight.dtype,
        device=weight.device,
        replay=replay,
    )


def pools(cache: Cache) -> list[torch.Tensor]:
    logs = [t for log in cache.logs for t in (log.k, log.u, log.g)]
    return [cache.k, cache.v, cache.draft_k, cache.draft_v, cache.states, cache.conv, *logs]


def caches(m: Decoder, rows: int, *, replay: bool) -> tuple[Cache, Cache, torch.Tensor, torch.Tensor]:
    """Two equal caches with random past, a page table for two sequences and their slots."""
    device = m.embed.weight.device
    made = [cache_of(m, rows, replay=replay) for _ in range(2)]
    generator = torch.Generator(device).manual_seed(3)
    for one, two in zip(pools(made[0]), pools(made[1]), strict=True):
        one.copy_(torch.randn(one.shape, generator=generator, device=device, dtype=one.dtype) * 0.3)
        two.copy_(one)
    table = torch.tensor([[2, 5, 7, 1], [9, 3, 11, 12]], device=device)
    return made[0], made[1], table, torch.tensor([2, 0], device=device)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(("kind", "replay"), [("qwen3_5", True), ("qwen3_5", False), ("qwen3", True), ("qwen2", True)])
@pytest.mark.parametrize("rows", [1, 4])
@torch.inference_mode()
def test_rows_and_caches(kind: str, replay: bool, rows: int, device: str, dtype: torch.dtype) -> None:
    m = model(kind, device, dtype)
    one, two, table, slots = caches(m, rows, replay=replay)
    ids = torch.tensor([[5, 9, 30, 7], [1, 80, 2, 44]], device=device)[:, :rows]
    lengths = torch.tensor([0, 21], device=device)
    committed = torch.tensor([1, rows], device=device)
    positions = (lengths[:, None] + torch.arange(rows, device=device)).contiguous()
    outs = []
    for runner, cache in ((PlainRunner(m, m), one), (FusedRunner(m, m, two, longest=64), two)):
        where = Rows(cache, table, positions, 64, slots, committed)
        post, pre = runner.target_rows(ids, where)
        out, recycled = runner.head_rows(ids, post, where)
        outs.append((post, pre, out, recycled, runner.logits(post), runner.draft_logits(out)))
    for a, b in zip(*outs, strict=True):
        assert relative(b, a) < 2e-5
    for i, (a, b) in enumerate(zip(pools(one), pools(two), strict=True)):
        assert a.numel() == 0 or relative(b, a) < 2e-5, i


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(("kind", "replay"), [("qwen3_5", True), ("qwen3_5", False), ("qwen3", True), ("qwen2", True)])
@pytest.mark.parametrize("flash", [False, True])
@torch.inference_mode()
def test_prefill(
    kind: str, replay: bool, flash: bool, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt rows from a beginning, after others and of sequences at different places, with either recurrence."""
    m = model(kind, device, dtype)
    one, two, table, slots = caches(m, 4, replay=replay)
    if flash:
        stand_in(monkeypatch)
        monkeypatch.setattr(contexts, "available", lambda x: True)
    ids = torch.randint(0, 90, (2, 13), generator=torch.Generator().manual_seed(1)).to(device)
    for starts in ([0, 20], [13, 33]):
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(13, device=device)
        outs = []
        for runner, cache in ((PlainRunner(m, m), one), (FusedRunner(m, m, two, longest=64), two)):
            where = Rows(cache, table, positions, max(starts) + 13, slots, torch.zeros_like(slots), starts=starts)
            post, pre = runner.target_rows(ids, where)
            outs.append((post, pre, *runner.head_rows(ids, post, where)))
        for a, b in zip(*outs, strict=True):
            assert relative(b, a) < 2e-5
        for i, (a, b) in enumerate(zip(pools(one), pools(two), strict=True)):
            assert a.numel() == 0 or relative(b, a) < 2e-5, i


@torch.inference_mode()
def rounds_of(
    m: Decoder, draft_tokens: list[int], *, fused: bool, replay: bool, temperature: float = 0.0
) -> list[RoundResult]:
    """Rounds of two prompts whose K changes from round to round."""
    cache = cache_of(m, max(draft_tokens) + 1, replay=replay)
    runner = FusedRunner(m, m, cache, longest=64) if fused else PlainRunner(m, m)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(2)]
    sampling = SamplingState.build(params, prompts, vocab_size=m.config.vocab, device=cache.device)
    pages, slots = zip(*(cache.take(60) for _ in prompts), strict=True)
    batch, _ = prefill(runner, cache, prompts, pages, slots, sampling, k=draft_tokens[0], chunk=3)
    results = []
    for k in draft_tokens:
        set_draft_tokens(runner, cache, batch, k)
        results.append(decode_round(runner, cache, batch))
    return results


FLOAT64_CPU = ("cpu", torch.float64, False)
FUSED = [FLOAT64_CPU, ("cpu", torch.float32, True), pytest.param("cuda", torch.float32, True, marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("device", "dtype", "fused"), FUSED)
def test_replay_equals_snapshots_while_k_changes(device: str, dtype: torch.dtype, fused: bool) -> None:
    m = model("qwen3_5", device, dtype)
    ks = [3, 0, 1, 3, 2, 0, 0, 3]
    expected = rounds_of(m, ks, fused=False, replay=False)
    for a, b in zip(rounds_of(m, ks, fused=fused, replay=True), expected, strict=True):
        assert a.accepted.tolist() == b.accepted.tolist()
        assert a.drafts.tolist() == b.drafts.tolist()
        assert a.tokens.tolist() == b.tokens.tolist()
        assert relative(a.logits, b.logits) < (1e-12 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_sampled_rounds_equal_plain_ones_while_k_changes(device: str, dtype: torch.dtype) -> None:
    """Fewer drafts than were made leave gaps between the sequences' draft probabilities."""
    m = model("qwen3_5", device, dtype)
    ks = [4, 2, 1, 3, 2, 4, 1]
    expected = rounds_of(m, ks, fused=False, replay=True, temperature=0.6)
    for a, b in zip(rounds_of(m, ks, fused=True, replay=True, temperature=0.6), expected, strict=True):
        assert (a.accepted.tolist(), a.drafts.tolist()) == (b.accepted.tolist(), b.drafts.tolist())
        for row, kept in enumerate(a.accepted.tolist()):
            assert a.tokens[row, : kept + 1].tolist() == b.tokens[row, : kept + 1].tolist()


@pytest.mark.parametrize("fused", [False, True])
@torch.inference_mode()
def test_draft_work_writes_only_draft_pages_of_its_own(fused: bool) -> None:
    """Extend and draft steps leave the target's keys, values, states, logs and inputs as they were."""
    m = model("qwen3_5", "cpu", torch.float32)
    before, cache, table, slots = caches(m, 4, replay=True)
    runner = FusedRunner(m, m, cache, longest=64) if fused else PlainRunner(m, m)
    sampling = SamplingState.build([SamplingParams(temperature=0.0)] * 2, [[0]] * 2, vocab_size=m.config.vocab)
    lengths = torch.tensor([3, 21])
    positions = lengths[:, None] + torch.arange(4)
    batch = Batch(
        lengths + 2,
        torch.tensor([5, 6]),
        torch.empty(2, 0, dtype=torch.int64),
        None,
        torch.tensor([2, 2]),
        table,
        slots,
        sampling,
        64,
    )
    hidden = torch.randn(2, 4, m.config.hidden, generator=torch.Generator().manual_seed(2))
    where = Rows(cache, table, positions, 64, slots, batch.committed)
    out, recycled = runner.head_rows(torch.tensor([[5, 9, 30, 7], [1, 80, 2, 44]]), hidden, where)
    drafts, _ = draft_tokens(runner, cache, batch, out[:, 1:2], recycled[:, 1:2], 3, bound=64)
    assert drafts.shape == (2, 3)
    for i, (then, now) in enumerate(zip(pools(before), pools(cache), strict=True)):
        if i not in (2, 3):
            assert torch.equal(then, now)
            continue
        changed = (then != now).any(-1).any(-1)[0].nonzero().tolist()
        # The extend's four rows; the draft steps' positions L+a+1 and L+a+2 lie among them.
        rows = [(int(table[b, p // 16]), p % 16) for b in range(2) for p in positions[b].tolist()]
        assert sorted(map(tuple, changed)) == sorted(rows)


class Asked(RowPlans):
    """Keeps the numbers of rows that plans are asked for."""

    def __init__(self) -> None:
        super().__init__({})
        self.rows: set[int] = set()

    def plan(self, n: int, k: int, rows: int) -> RowPlan:
        self.rows.add(rows)
        return super().plan(n, k, rows)


@pytest.mark.parametrize(("size", "padded"), [(1, 1), (2, 2), (3, 4)])
@torch.inference_mode()
def test_eager_rounds_take_the_plans_of_the_batch_that_graphs_pad_to(size: int, padded: int) -> None:
    m = model("qwen3_5", "cpu", torch.float32)
    cache, plans = cache_of(m, 5, replay=True), Asked()
    runner = FusedRunner(m, m, cache, longest=64, plans=plans)
    prompts = [[3, 1, 4]] * size
    sampling = SamplingState.build(
        [SamplingParams(temperature=0.0)] * size, prompts, vocab_size=m.config.vocab, device=cache.device
    )
    pages, slots = zip(*(cache.take(30) for _ in prompts), strict=True)
    batch, _ = prefill(runner, cache, prompts, pages, slots, sampling, k=4, chunk=3)
    plans.rows.clear()
    decode_round(runner, cache, batch)
    # Verify and extend, and single draft steps with the logits of all heads' last rows.
    assert plans.rows == {5 * padded, padded}


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3"])
def test_settled_keys_and_values_are_older_than_the_round(
    kind: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What attention may load before kernels of the round are done, none of them writes: in verify, extend and drafts,
    while K changes."""
    m, seen = model(kind, device, dtype), set()
    attend, plain_round, started = attention_triton.paged_attention, decode_round, dict[int, torch.Tensor]()

    def watched(*args: Any, settled: torch.Tensor | None, **options: Any) -> torch.Tensor:
        if settled is not None:
            k_pool, v_pool, table, positions = args[1:5]
            for b, count in enumerate(settled.tolist()):
                assert 0 < count <= int(positions[b, 0])
                seen.add((count < int(positions[b, 0]), positions.shape[1]))
                at = torch.arange(count, device=table.device)
                page, at = table[b, at // 16], at % 16
                for pool in (k_pool, v_pool):
                    assert torch.equal(pool[page, at], started[pool.data_ptr()][page, at])
        return attend(*args, settled=settled, **options)

    def round_of(runner: FusedRunner, cache: Cache, batch: Batch) -> RoundResult:
        layers = [layer for pool in pools(cache)[:4] for layer in pool]
        started.update({layer.data_ptr(): layer.clone() for layer in layers})
        return plain_round(runner, cache, batch)

    monkeypatch.setattr(attention_triton, "paged_attention", watched)
    monkeypatch.setitem(globals(), "decode_round", round_of)
    rounds_of(m, [3, 0, 1, 2], fused=True, replay=True)
    # Rows at the settled end: verify and extend; beyond it: draft steps.
    assert seen == {(False, 4), (False, 1), (False, 2), (False, 3), (True, 1)}


def decode(m: Decoder, k: int, prompts: list[list[int]], fused: bool) -> list[Running]:
    engine = Engine(m, draft_tokens=k, page_size=16, fused=fused)
    requests = [Request(p, SamplingParams(temperature=0.0, max_tokens=5)) for p in prompts]
    sequences: dict[int, Running] = {}
    for news in engine.rounds(requests):
        sequences |= {s.index: s for s, _ in news}
    return [sequences[i] for i in range(len(prompts))]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("kind", ["qwen3_5"])
def test_decodes_alike(kind: str, device: str, dtype: torch.dtype) -> None:
    m = model(kind, device, dtype)
    prompts = [[3, 1, 4, 1, 5], [9]]
    plain = decode(m, 3, prompts, fused=False)
    fused = decode(m, 3, prompts, fused=True)
    assert [s.tokens for s in fused] == [s.tokens for s in plain]
    assert [s.rounds for s in fused] == [s.rounds for s in plain]


def test_what_is_not_covered() -> None:
    m = model("qwen3_5", "cpu", torch.float32)
    assert FusedRunner.supports(m, m)
    config = m.config
    for change in ({"gdn_v_dim": 12}, {"sparse_layers": (True,)}, {"o_bias": True}):
        m.config = replace(config, **change)
        assert not FusedRunner.supports(m, m)
    m.config = config
