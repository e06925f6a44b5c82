"""Extend and draft steps write draft keys and values only, at their own positions; guards around every pool stay.

Every pool is a view into a larger tensor: a page or sequence before and behind it holds a sentinel. The same checks run
over any runner and device: the modules on a CPU here, the fused kernels on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.contexts import Rows
from nextn.engine.prefill import page_table
from nextn.engine.round import decode_round, draft, set_draft_tokens
from nextn.engine.runner import PlainRunner, Runner
from nextn.engine.sampling import SamplingParams, SamplingState
from nextn.kernels.delta import DeltaLog
from nextn.models.decoder import Decoder
from tests.engine.models import decoder

SENTINEL = -77.0
PAGE_SIZE, PAGES, SLOTS = 16, 20, 5
TARGET, DRAFT = ("k", "v", "states", "conv"), ("draft_k", "draft_v")
RUNNERS = [
    pytest.param("plain", "cpu", torch.float64, id="plain-cpu"),
    pytest.param("plain-replay", "cpu", torch.float64, id="plain-replay-cpu"),
    pytest.param("plain", "cuda", torch.float32, id="plain-cuda", marks=pytest.mark.gpu),
    pytest.param("fused", "cuda", torch.float32, id="fused-cuda", marks=pytest.mark.gpu),
    pytest.param("fused", "cuda", torch.bfloat16, id="fused-cuda-bf16", marks=pytest.mark.gpu),
    pytest.param("fused-replay", "cuda", torch.float32, id="fused-replay-cuda", marks=pytest.mark.gpu),
    pytest.param("fused-replay", "cuda", torch.bfloat16, id="fused-replay-cuda-bf16", marks=pytest.mark.gpu),
]


@dataclass
class Guarded:
    """A cache of random contents whose pools lie between guards.

    Attributes:
        whole: name -> the tensor that the pool is a view of, [layers, one page or sequence longer at either end, ..].
    """

    cache: Cache
    whole: dict[str, Tensor]

    @classmethod
    def make(cls, model: Decoder, rows: int, seed: int, kind: str = "plain") -> Guarded:
        weight = model.embed.weight
        cache = Cache(
            model.config,
            pages=PAGES,
            page_size=PAGE_SIZE,
            sequences=SLOTS,
            rows=rows,
            dtype=weight.dtype,
            device=weight.device,
            replay=kind.endswith("-replay"),
        )
        generator = torch.Generator().manual_seed(seed)
        whole: dict[str, Tensor] = {}
        for name in (*TARGET, *DRAFT):
            pool: Tensor = getattr(cache, name)
            shape = (pool.shape[0], pool.shape[1] + 2, *pool.shape[2:])
            whole[name] = torch.full(shape, SENTINEL, dtype=pool.dtype, device=pool.device)
            inside = whole[name][:, 1:-1]
            inside.copy_(torch.randn(pool.shape, generator=generator) * 0.3)
            setattr(cache, name, inside)
        for i, log in enumerate(cache.logs):
            parts = []
            for name, part in (("k", log.k), ("u", log.u), ("g", log.g)):
                guarded = torch.full((1, part.shape[0] + 2, *part.shape[1:]), SENTINEL, dtype=part.dtype)
                guarded[0, 1:-1] = torch.randn(part.shape, generator=generator) * 0.3
                whole[f"log {i} {name}"] = guarded = guarded.to(part.device)
                parts.append(guarded[0, 1:-1])
            cache.logs[i] = DeltaLog(*parts)
        return cls(cache, whole)

    def target(self) -> dict[str, bytes]:
        """Every byte of every buffer of the target, guards included."""
        names = [name for name in self.whole if name not in DRAFT]
        return {n: self.whole[n].cpu().contiguous().view(torch.uint8).numpy().tobytes() for n in names}

    def guards_stand(self) -> bool:
        return all(bool((t[:, [0, -1]] == SENTINEL).all()) for t in self.whole.values())

    def written(self, name: str, before: Tensor) -> set[tuple[int, int]]:
        """(page, offset) where a pool of keys or values differs from before, in any layer."""
        changed = (self.whole[name][:, 1:-1] != before).flatten(3).any(-1).any(0)
        return {(int(p), int(o)) for p, o in changed.nonzero().tolist()}

    def inside(self, name: str) -> Tensor:
        return self.whole[name][:, 1:-1].clone()


def a_runner(kind: str, model: Decoder, cache: Cache) -> Runner:
    if kind.startswith("plain"):
        return PlainRunner(model, model)
    from nextn.engine.fused import FusedRunner

    return FusedRunner(model, model, cache, longest=PAGES * PAGE_SIZE)


def a_model(kind: str, device: str, dtype: torch.dtype) -> Decoder:
    if kind.startswith("plain") and device == "cpu":
        return decoder("qwen3_5", dtype)
    from tests.engine.test_fused import model

    return model("qwen3_5", device, dtype)


def a_batch(guarded: Guarded, model: Decoder, lengths: list[int], k: int, seed: int, temperature: float) -> Batch:
    """Sequences in mid-decode: random tokens, pages in random order, nobody's pages between them."""
    generator = torch.Generator().manual_seed(seed)
    device, dtype, size = guarded.cache.device, guarded.cache.dtype, len(lengths)
    order = torch.randperm(PAGES, generator=generator).tolist()
    pages = []
    for length in lengths:
        count = -(-(length + max(2 * k, 1)) // PAGE_SIZE)
        pages.append([order.pop() for _ in range(count)])
    vocab, hidden = model.config.vocab, model.config.hidden
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(size)]

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, vocab, shape, generator=generator).to(device)

    drafts = ids(size, k)
    law = torch.rand(size, k, vocab, generator=generator).to(device)
    return Batch(
        lengths=torch.tensor(lengths, device=device),
        bonus=ids(size),
        drafts=drafts,
        draft_probs=law / law.sum(-1, keepdim=True) if temperature and k else None,
        committed=torch.randint(1, k + 2, (size,), generator=generator).to(device),
        table=page_table(pages, guarded.cache.device),
        slots=torch.randperm(SLOTS, generator=generator)[:size].to(device),
        sampling=SamplingState.build(params, [[0]] * size, vocab_size=vocab, device=device),
        bound=max(lengths),
        head_out=torch.randn(size, 1, hidden, generator=generator).to(device, dtype),
        head_hidden=torch.randn(size, 1, hidden, generator=generator).to(device, dtype),
    )


def places(batch: Batch, table: Tensor, row: int, positions: range) -> set[tuple[int, int]]:
    return {(int(table[row, p // PAGE_SIZE]), p % PAGE_SIZE) for p in positions}


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=3)
cases = {
    "lengths": lengths,
    "k": st.integers(0, 5),
    "seed": st.integers(0, 2**16),
    "temperature": st.sampled_from((0.0, 0.9)),
}


@pytest.mark.parametrize(("kind", "device", "dtype"), RUNNERS)
@given(**cases)
def test_a_round_writes_where_it_may(
    kind: str, device: str, dtype: torch.dtype, lengths: list[int], k: int, seed: int, temperature: float
) -> None:
    """Target pools after a round are, bit for bit, those after its verify alone; keys and values changed at exactly
    the rows' positions; the draft pool at those and at the draft steps' further ones."""
    model = a_model(kind, device, dtype)
    verified, rounded = (Guarded.make(model, k + 1, seed, kind) for _ in range(2))
    batch = a_batch(rounded, model, lengths, k, seed, temperature)
    pools = {name: rounded.inside(name) for name in ("k", "v", *DRAFT)}
    table, size = batch.table.clone(), batch.size
    with torch.inference_mode():
        rows = torch.cat((batch.bonus[:, None], batch.drafts), 1)
        positions = (batch.lengths[:, None] + torch.arange(k + 1, device=rows.device)).contiguous()
        where = Rows(verified.cache, table, positions, batch.bound + k + 1, batch.slots, batch.committed)
        a_runner(kind, model, verified.cache).target_rows(rows, where)
        result = decode_round(a_runner(kind, model, rounded.cache), rounded.cache, batch)
    assert rounded.target() == verified.target()
    assert rounded.guards_stand()
    assert verified.guards_stand()
    verify = set.union(*(places(batch, table, b, range(n, n + k + 1)) for b, n in enumerate(lengths)))
    further: set[tuple[int, int]] = set()
    for b in range(size):
        start = lengths[b] + int(result.accepted[b]) + 1
        further |= places(batch, table, b, range(start, start + k - 1))
    for name in ("k", "v"):
        assert rounded.written(name, pools[name]) == verify
    for name in DRAFT:
        assert rounded.written(name, pools[name]) == verify | further


@pytest.mark.parametrize(("kind", "device", "dtype"), RUNNERS)
@given(**cases, again=st.integers(0, 5))
def test_drafting_leaves_the_target_alone(
    kind: str, device: str, dtype: torch.dtype, lengths: list[int], k: int, seed: int, temperature: float, again: int
) -> None:
    """Extend rows, draft steps and drafting anew at another K: every byte of every target buffer stays."""
    model = a_model(kind, device, dtype)
    guarded = Guarded.make(model, 6, seed, kind)
    batch = a_batch(guarded, model, lengths, max(k, again), seed, temperature)
    runner, before = a_runner(kind, model, guarded.cache), guarded.target()
    drafted = {name: guarded.inside(name) for name in DRAFT}
    positions = (batch.lengths[:, None] + torch.arange(k + 1, device=batch.lengths.device)).contiguous()
    hidden = torch.randn(batch.size, k + 1, model.config.hidden).to(device, dtype)
    with torch.inference_mode():
        where = Rows(guarded.cache, batch.table, positions, batch.bound + k + 1, batch.slots, batch.committed)
        runner.head_rows(torch.zeros_like(positions), hidden, where)
        draft(runner, guarded.cache, replace(batch), k)
        set_draft_tokens(runner, guarded.cache, batch, again)
    assert batch.draft_tokens == again
    assert guarded.target() == before
    assert guarded.guards_stand()
    extend = set.union(*(places(batch, batch.table, b, range(n, n + k + 1)) for b, n in enumerate(lengths)))
    own = set.union(*(places(batch, batch.table, b, range(n, n + max(k, again) + 1)) for b, n in enumerate(lengths)))
    for name in DRAFT:
        assert extend <= guarded.written(name, drafted[name]) <= own


def test_the_checks_can_fail() -> None:
    """One changed element of a target buffer, and one of a guard, are seen."""
    model = decoder("qwen3_5")
    guarded = Guarded.make(model, 2, 0)
    before: dict[str, Any] = guarded.target()
    guarded.cache.states[1, 2].view(-1)[5] += 1e-9
    assert guarded.target() != before
    assert guarded.guards_stand()
    guarded.whole["draft_v"][0, -1].view(-1)[-1] = 0
    assert not guarded.guards_stand()
