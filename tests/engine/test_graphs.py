"""Graphs on a GPU: the tokens of eager rounds, bit for bit, and draft steps that write only draft keys and values."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nextn.checkpoint.source import open_checkpoint
from nextn.engine.batch import Batch, join
from nextn.engine.cache import Cache
from nextn.engine.engine import Engine
from nextn.engine.executor import EagerExecutor, HostRound, to_host
from nextn.engine.fused import FusedRunner
from nextn.engine.graphs import GraphExecutor
from nextn.engine.prefill import prefill
from nextn.engine.request import Request, Round, Running
from nextn.engine.round import decode_round
from nextn.engine.sampling import SamplingParams, SamplingState
from nextn.kernels.row_plans import RowPlans
from nextn.models.decoder import Decoder, Drafter
from nextn.models.load import load_decoder, load_drafter
from tests.engine.host_rounds import assert_alike, fill_outside
from tests.engine.models import decode
from tests.oracle.checkpoints import make_checkpoint

CUDA = torch.device("cuda")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 7], [30] * 21]
SIZES = {"hidden_size": 128, "head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "vocab_size": 1009}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SPLIT = {"kind": "swap", "block_n": 64, "block_k": 32, "splits": 2, "stages": 3, "first": 1, "ahead": 1}
WIDE = {**SPLIT, "splits": 1, "ahead": 0, "block_m": 32}
PLANS = {
    "1": {"kind": "fma", "block_n": 4, "block_k": 128},
    "4": SPLIT,
    "16": {**SPLIT, "splits": 1, "first": 2},
    "32": WIDE,
}
"""Own products, with weights read before the wait of a dependent launch; the measured table lists no such shapes."""
WHOLE = 1024
OTHERS = {**PLANS, "4": {"kind": "fma", "block_n": 2, "block_k": WHOLE}, "16": SPLIT}
"""Of weights with fewer outputs than inputs, where a program can hold all of those."""
ASKED: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"min_tokens": 9}, {"logit_bias": {3: 2.0}, "logprobs": 0}]


MANY = {"linear_num_key_heads": 16, "linear_num_value_heads": 64, "linear_value_head_dim": 64}
"""Heads of the delta net that fill a card: their programs differ from those of few (`delta_triton.program_of`)."""


@functools.cache
def models(dtype: torch.dtype, many: bool = False) -> tuple[Decoder, Drafter]:
    """Target and separate draft; `many` heads of the delta net, or few."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(make_checkpoint(Path(folder), "qwen3_5", **{**SIZES, **(MANY if many else {})}))
        target, _ = load_decoder(checkpoint, dtype=dtype, device=CUDA)
        return target, load_drafter(checkpoint, dtype=dtype, device=CUDA)[0]


def plans_of(target: Decoder) -> RowPlans:
    shapes = [w.shape for w in target.parameters() if w.dim() == 2]
    return RowPlans({f"{n}x{k}": OTHERS if n <= k <= WHOLE else PLANS for n, k in shapes})


def start(
    dtype: torch.dtype,
    k: int,
    *,
    separate: bool = False,
    temperature: float | Sequence[float] = 0.0,
    others: int = 0,
    dependent: bool | None = None,
    many: bool = False,
    **asked: Any,
) -> tuple[FusedRunner, Cache, Batch]:
    """A cache with the prompts prefilled, and their batch; the first pages and slots belong to `others`.

    Args:
        dependent: whether kernels start early; None where the GPU can.
    """
    target, draft = models(dtype, many)
    cache = Cache(target.config, pages=60, page_size=16, sequences=6, rows=k + 1, dtype=dtype, device=CUDA, replay=True)
    for _ in range(others):
        cache.take(1)
    head = draft if separate else target
    runner = FusedRunner(target, head, cache, longest=200, plans=plans_of(target), dependent=dependent)
    heat = temperature if isinstance(temperature, Sequence) else [temperature] * len(PROMPTS)
    params = [SamplingParams(temperature=t, seed=i, max_tokens=100, **asked) for i, t in enumerate(heat)]
    sampling = SamplingState.build(params, PROMPTS, vocab_size=target.config.vocab, device=CUDA)
    batches = []
    with torch.inference_mode():
        for i, prompt in enumerate(PROMPTS):
            pages, slot = cache.take(200)
            batch, _ = prefill(runner, cache, [prompt], [pages], [slot], sampling.select([i]), k=k, chunk=8)
            batches.append(batch)
        batch = join(batches, sampling)
        batch.sampling.commit(batch.bonus[:, None], torch.ones_like(batch.bonus))
    return runner, cache, batch


def eager(runner: FusedRunner, cache: Cache, batch: Batch, rounds: int) -> list[HostRound]:
    out = []
    with torch.inference_mode():
        for _ in range(rounds):
            r = decode_round(runner, cache, batch)
            out.append(to_host(r, batch.sampling.params))
    return out


def graphed(runner: FusedRunner, cache: Cache, batch: Batch, rounds: int) -> tuple[GraphExecutor, list[HostRound]]:
    executor = GraphExecutor(runner, cache)
    executor.load(batch)
    out = []
    executor.launch()
    for _ in range(rounds - 1):
        executor.launch()
        out.append(executor.collect())
    out.append(executor.collect())
    return executor, out


CASES: list[tuple[torch.dtype, int, float | tuple[float, ...]]] = [
    (BF16, 3, 0.0), (BF16, 3, (0.0, 0.9, 0.0)), (BF16, 1, (1.2, 0.0, 0.0)), (BF16, 0, 0.9), (F32, 3, 0.0),
    (F32, 0, (0.0, 0.9, 0.0)),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "k", "temperature"), CASES)
def test_graphs_equal_eager_rounds(dtype: torch.dtype, k: int, temperature: float | Sequence[float]) -> None:
    """In the graphs kernels start before those ahead of them have ended; here none does."""
    expected = eager(*start(dtype, k, temperature=temperature, dependent=False), 12)
    _, got = graphed(*start(dtype, k, temperature=temperature), 12)
    assert got == expected


@pytest.mark.gpu
@pytest.mark.parametrize("k", [2, 4])
def test_graphs_equal_eager_rounds_where_padding_takes_the_rows_past_a_plan(k: int) -> None:
    """Three sequences of 5 rows are 15, which another plan serves than the 20 of four."""
    expected = eager(*start(BF16, k, dependent=False), 12)
    _, got = graphed(*start(BF16, k), 12)
    assert got == expected


@pytest.mark.gpu
@pytest.mark.parametrize("many", [False, True])
def test_which_programs_the_delta_step_has(many: bool) -> None:
    """Few heads and many are both among these tests."""
    from nextn.kernels.delta_triton import FEW, program_of

    heads = models(BF16, many)[0].config.gdn_v_heads
    assert (program_of(len(PROMPTS), heads) == FEW) != many


@pytest.mark.gpu
@pytest.mark.parametrize("k", [0, 3])
def test_graphs_of_many_heads_equal_eager_rounds_and_a_separate_draft(k: int) -> None:
    expected = eager(*start(BF16, k, many=True, dependent=False), 12)
    _, native = graphed(*start(BF16, k, many=True), 12)
    _, separate = graphed(*start(BF16, k, many=True, separate=True), 12)
    assert native == expected
    assert separate == expected


@pytest.mark.gpu
@pytest.mark.parametrize("k", [0, 3])
def test_padding_works_on_scratch_alone(k: int) -> None:
    """Pages and slots that belong to sequences outside the batch, the first ones among them, keep their bytes."""
    runner, cache, batch = start(BF16, k, others=1)
    executor = GraphExecutor(runner, cache)
    unchanged = fill_outside(executor, batch, 6)
    executor.load(batch)
    assert executor.now is not None
    assert executor.now.size == 4
    for _ in range(12):
        executor.launch()
        executor.collect()
    unchanged()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("temperature", "asked"),
    [(0.0, {"logprobs": 3}), (0.9, {"logprobs": 0, "logit_bias": {5: 4.0, 9: -3.0, 700: 1.5}})],
)
def test_what_requests_ask_beside_tokens_is_captured_too(temperature: float, asked: dict[str, Any]) -> None:
    """Log probabilities and biases: graphs give what eager rounds give."""
    runner, cache, batch = start(F32, 3, temperature=temperature, **asked)
    executor = EagerExecutor(runner, cache)
    executor.load(batch)
    expected = []
    for _ in range(12):
        with torch.inference_mode():
            executor.launch(0)
        expected.append(executor.collect())
    _, got = graphed(*start(F32, 3, temperature=temperature, **asked), 12)
    assert all(len(row) == 4 for r in got for row in r.logprobs)
    assert_alike(got, expected)


@pytest.mark.gpu
def test_separate_draft_gives_the_same_drafts() -> None:
    _, native = graphed(*start(BF16, 3), 12)
    _, separate = graphed(*start(BF16, 3, separate=True), 12)
    assert native == separate


@pytest.mark.gpu
def test_membership_changes_between_launches() -> None:
    """Sequences leave while a round is in flight; the others go on as if they had been alone."""
    expected = eager(*start(BF16, 3), 12)
    runner, cache, batch = start(BF16, 3)
    executor, first = graphed(runner, cache, batch, 5)
    executor.load(executor.unload().keep([0, 2]))
    executor.launch()
    rest = []
    for _ in range(6):
        executor.launch()
        rest.append(executor.collect())
    rest.append(executor.collect())
    assert first == expected[:5]
    for r, e in zip(rest, expected[5:], strict=True):
        assert (r.tokens, r.accepted) == ([e.tokens[0], e.tokens[2]], [e.accepted[0], e.accepted[2]])


@pytest.mark.gpu
def test_draft_work_writes_only_draft_pools() -> None:
    """Extend and draft steps, captured: every target buffer keeps its bytes, and so do pages of nobody's and what lies
    around every pool."""
    from nextn.engine.contexts import Rows
    from nextn.engine.round import draft_tokens

    runner, cache, batch = start(BF16, 3)
    around = {}
    for name in ("k", "v", "draft_k", "draft_v", "states", "conv"):
        pool = getattr(cache, name)
        around[name] = torch.full((pool.shape[0], pool.shape[1] + 2, *pool.shape[2:]), -77.0).to(CUDA, pool.dtype)
        around[name][:, 1:-1] = pool
        setattr(cache, name, around[name][:, 1:-1])
    target = [cache.k, cache.v, cache.states, cache.conv, *(t for log in cache.logs for t in (log.k, log.u, log.g))]
    owned = set(batch.table.flatten().tolist())
    guard = torch.tensor([p for p in range(cache.k.shape[1]) if p not in owned], device=CUDA)
    for pool in (*target[:2], cache.draft_k, cache.draft_v):
        pool[:, guard] = torch.randn_like(pool[:, guard])
    hidden = torch.randn(batch.size, 4, runner.target.config.hidden, dtype=BF16, device=CUDA)
    tokens = torch.randint(0, 1009, (batch.size, 4), device=CUDA)

    def work() -> None:
        positions = (batch.lengths[:, None] + torch.arange(4, device=CUDA)).contiguous()
        where = Rows(cache, batch.table, positions, 0, batch.slots, batch.committed)
        out, recycled = runner.head_rows(tokens, hidden, where)
        draft_tokens(runner, cache, replace(batch), out[:, -1:], recycled[:, -1:], 3, bound=0)

    with torch.inference_mode():
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        before = [p.clone() for p in target]
        guards = [cache.draft_k[:, guard].clone(), cache.draft_v[:, guard].clone()]
        drafts = [cache.draft_k.clone(), cache.draft_v.clone()]
        rows = batch.lengths[:, None] + torch.arange(4, device=CUDA)
        pages, offsets = batch.table.gather(1, rows // cache.page_size), rows % cache.page_size
        for pool in (cache.draft_k, cache.draft_v):
            pool[:, pages, offsets] = 0
        graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(before, target, strict=True))
    assert torch.equal(guards[0], cache.draft_k[:, guard])
    assert torch.equal(guards[1], cache.draft_v[:, guard])
    assert all(bool((whole[:, [0, -1]] == -77).all()) for whole in around.values())
    # What extend and draft steps write, they wrote again where it had been cleared; nothing else changed.
    assert torch.equal(drafts[0], cache.draft_k)
    assert torch.equal(drafts[1], cache.draft_v)


class Recording(FusedRunner):
    """Keeps the head's logits."""

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().draft_logits(hidden)
        self.kept.append(out)
        return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@torch.inference_mode()
def test_draft_logits_captured_eager_and_of_a_separate_draft_are_the_same_bits(dtype: torch.dtype) -> None:
    """Of the extend's last row and of every further step."""
    from nextn.engine.contexts import Rows
    from nextn.engine.round import draft_tokens

    target, separate = models(dtype)
    generator = torch.Generator(CUDA).manual_seed(5)
    hidden = torch.randn(3, 4, target.config.hidden, dtype=dtype, device=CUDA, generator=generator)
    tokens = torch.randint(0, 1009, (3, 4), device=CUDA, generator=generator)

    def logits(draft: Drafter, capture: bool) -> list[torch.Tensor]:
        _, cache, batch = start(dtype, 3)
        runner = Recording(target, draft, cache, longest=200, plans=plans_of(target))

        def work() -> None:
            runner.kept = []
            positions = batch.lengths[:, None] + torch.arange(4, device=CUDA)
            where = Rows(cache, batch.table, positions, 0, batch.slots, batch.committed)
            out, recycled = runner.head_rows(tokens, hidden, where)
            draft_tokens(runner, cache, replace(batch), out[:, -1:], recycled[:, -1:], 3, bound=0)

        work()
        torch.cuda.synchronize()
        if capture:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            graph.replay()
        return [t.clone() for t in runner.kept]

    eager_logits = logits(target, False)
    assert len(eager_logits) == 3
    assert all(not t.isnan().any() for t in eager_logits)
    for other in (logits(target, True), logits(separate, True), logits(separate, False)):
        assert all(torch.equal(a, b) for a, b in zip(other, eager_logits, strict=True))


@pytest.mark.gpu
def test_a_replay_in_slots_and_pages_that_others_had_gives_the_same_tokens() -> None:
    """The same graph serves the same prompts again after pages and slots were freed and handed out in another order."""
    target, _ = models(BF16)
    cache = Cache(target.config, pages=60, page_size=16, sequences=6, rows=4, dtype=BF16, device=CUDA, replay=True)
    runner = FusedRunner(target, target, cache, longest=200)
    executor = GraphExecutor(runner, cache)
    params = [SamplingParams(temperature=0.0, max_tokens=100)] * len(PROMPTS)

    def run() -> tuple[list[HostRound], list[int], list[list[int]]]:
        sampling = SamplingState.build(params, PROMPTS, vocab_size=target.config.vocab, device=CUDA)
        batches, taken = [], []
        with torch.inference_mode():
            for i, prompt in enumerate(PROMPTS):
                taken.append(cache.take(200))
                batch, _ = prefill(
                    runner, cache, [prompt], [taken[-1][0]], [taken[-1][1]], sampling.select([i]), k=3, chunk=8
                )
                batches.append(batch)
            executor.load(join(batches, sampling))
        rounds = []
        for _ in range(12):
            executor.launch()
            rounds.append(executor.collect())
        for pages, slot in taken[1:] + taken[:1]:
            cache.give_back(pages, slot)
        return rounds, [slot for _, slot in taken], [pages for pages, _ in taken]

    first, slots, pages = run()
    again, other_slots, other_pages = run()
    assert len(executor.captured) == 1
    assert slots != other_slots
    assert pages != other_pages
    assert again == first


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "k"), [(BF16, 3), (F16, 3), (F32, 0)])
def test_engine_over_graphs_equals_eager_engine(dtype: torch.dtype, k: int) -> None:
    """Whole requests, with stops, lengths and wishes of their own, launched ahead."""
    target, _ = models(dtype)
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3], [5]]

    def run(graphs: bool) -> list[tuple[list[int], list[Round], str | None, list[int]]]:
        engine = Engine(target, draft_tokens=k, page_size=16, graphs=graphs)
        requests = [
            Request(p, SamplingParams(temperature=0.0, max_tokens=20 + 3 * i, stop_token_ids=[5 * i + 1], **asked))
            for (i, p), asked in zip(enumerate(prompts), ASKED, strict=True)
        ]
        sequences: dict[int, Running] = {}
        for news in engine.rounds(requests):
            sequences |= {s.index: s for s, _ in news}
        return [
            (s.tokens, s.rounds, s.finish, [p.token for p in s.logprobs])
            for s in (sequences[i] for i in range(len(prompts)))
        ]

    assert run(True) == run(False)


@pytest.mark.gpu
def test_more_sequences_than_any_measured_product_takes() -> None:
    """33 of them, in a graph of 64; exact, so that padding may not change a bit either."""
    target, _ = models(BF16)
    prompts = [[1 + i, 7 * i % 1009, 3] for i in range(33)]
    runs = [
        decode(Engine(target, draft_tokens=1, page_size=16, exact=True, graphs=graphs), prompts, max_tokens=9)
        for graphs in (False, True)
    ]
    assert [(s.tokens, s.rounds) for s in runs[1]] == [(s.tokens, s.rounds) for s in runs[0]]
