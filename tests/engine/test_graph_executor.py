"""The graph executor's bookkeeping, on any machine: its rounds give what eager ones give, and padding stays on scratch.

`test_graphs` holds real graphs to the same on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nextn.engine.batch import Batch, join
from nextn.engine.cache import Cache
from nextn.engine.executor import EagerExecutor, Executor, HostRound
from nextn.engine.graphs import GraphExecutor
from nextn.engine.prefill import prefill
from nextn.engine.sampling import SamplingParams, SamplingState
from tests.engine.host_rounds import assert_alike, fill_outside
from tests.engine.models import decoder
from tests.engine.replayed import Far, replay_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs tests/engine/test_graphs.py")
REACH = 64
PROMPTS = [[3, 1, 4, 1, 5], [7, 7], [30] * 9]
ASKED: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {}, {}],
    "sampled after greedy": [{}, {"temperature": 0.9}, {}],
    "reports": [{}, {"logprobs": 3}, {"logprobs": 0}],
    "biases of different lengths": [{"logit_bias": {5: 4.0}}, {"logit_bias": {9: -3.0, 70: 1.5, 3: 2.0}}, {}],
    "held back": [{}, {"min_tokens": 4, "stop_token_ids": [1, 2, 3]}, {"temperature": 0.7, "presence_penalty": 0.5}],
}


def start(asked: list[dict[str, Any]], k: int) -> tuple[Far, Cache, Batch]:
    """A cache whose first page and slot are another's, with the prompts prefilled."""
    m = decoder("qwen3_5")
    cache = Cache(
        m.config, pages=20, page_size=16, sequences=5, rows=k + 1, dtype=torch.float64, device=torch.device("cpu"),
        replay=True,
    )  # fmt: skip
    cache.take(1)
    runner = Far(m, m)
    params = [SamplingParams(**{"temperature": 0.0, "seed": i, **a}) for i, a in enumerate(asked)]
    sampling = SamplingState.build(
        params, PROMPTS, vocab_size=m.config.vocab, stop_ids=[p.stop_ids(()) for p in params]
    )
    batches = []
    for i, prompt in enumerate(PROMPTS):
        pages, slot = cache.take(REACH)
        batches.append(prefill(runner, cache, [prompt], [pages], [slot], sampling.select([i]), k=k, chunk=16)[0])
    return runner, cache, join(batches, SamplingState.join([b.sampling for b in batches]))


def rounds(executor: Executor, batch: Batch, count: int) -> list[HostRound]:
    """Rounds of which each is launched before the one before it is read, where the executor does so."""
    executor.load(batch)
    out = []
    for _ in range(count):
        executor.launch(REACH)
        out += [executor.collect()] if not executor.ahead or len(getattr(executor, "flight", ())) > 1 else []
    return out + [executor.collect() for _ in range(count - len(out))]


@pytest.mark.parametrize("wishes", ASKED)
@pytest.mark.parametrize("k", [0, 2])
@torch.inference_mode()
def test_rounds_equal_eager_ones(wishes: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, cache, batch = start(ASKED[wishes], k)
    expected = rounds(EagerExecutor(runner, cache), batch, 10)
    replay_on_cpu(monkeypatch)
    runner, cache, batch = start(ASKED[wishes], k)
    assert_alike(rounds(GraphExecutor(runner, cache), batch, 10), expected)


@torch.inference_mode()
def test_padding_works_on_scratch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and slots of sequences outside the batch, the first ones among them, keep their bytes."""
    replay_on_cpu(monkeypatch)
    runner, cache, batch = start(ASKED["greedy"], 2)
    executor = GraphExecutor(runner, cache)
    unchanged = fill_outside(executor, batch, 5)
    rounds(executor, batch, 10)
    assert executor.now is not None
    assert executor.now.size == 4
    unchanged()


@torch.inference_mode()
def test_a_request_that_asks_for_more_leaves_the_others_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it gone, the batch goes back to the graph without reports, and on with the tokens it would have had."""
    runner, cache, batch = start(ASKED["greedy"], 2)
    alone = rounds(EagerExecutor(runner, cache), batch, 10)
    replay_on_cpu(monkeypatch)
    runner, cache, batch = start(ASKED["reports"], 2)
    executor = GraphExecutor(runner, cache)
    first = rounds(executor, batch, 5)
    rest = executor.unload().keep([0])
    then = rounds(executor, rest, 5)
    assert [r.tokens[0] for r in (*first, *then)] == [r.tokens[0] for r in alone]
    assert [len(r.logprobs[1]) for r in first] == [3] * 5
    assert all(r.logprobs == [[]] for r in then)
    assert [c.state.sampling.plan.reported for c in executor.captured.values()] == [4, None]


@torch.inference_mode()
def test_a_batch_that_lost_its_penalties_and_one_that_had_none_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first: what is left of the one still carries counts."""
    replay_on_cpu(monkeypatch)
    for order in (0, 1):
        runner, cache, batch = start([{}, {"presence_penalty": 0.5, "repetition_penalty": 1.2}, {}], 2)
        left, plain = batch.keep([0, 2]), start(ASKED["greedy"], 2)[2].keep([0, 2])
        assert (left.sampling.counts.shape[1], plain.sampling.counts.shape[1]) == (97, 0)
        executor = GraphExecutor(runner, cache)
        executor.load((left, plain)[order])
        executor.load((plain, left)[order])
        assert len(executor.captured) == 1
        eager = EagerExecutor(*start(ASKED["greedy"], 2)[:2])
        assert_alike(rounds(executor, left, 6), rounds(eager, start(ASKED["greedy"], 2)[2].keep([0, 2]), 6))
