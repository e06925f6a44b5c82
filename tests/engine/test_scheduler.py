"""The scheduler's promises one by one: arrivals, cancellation, pauses, refusals, broken logits, results read late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nextn.engine.cache import Cache
from nextn.engine.draft_length import FixedLength
from nextn.engine.engine import Engine
from nextn.engine.executor import EagerExecutor
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request, Running
from nextn.engine.runner import PlainRunner
from nextn.engine.sampling import SamplingState, process
from nextn.engine.scheduler import Scheduler
from nextn.errors import NextnError
from nextn.options import MAX_CHUNK
from tests.engine.traces import tiny

VOCAB = 11


def scheduler(
    k: int = 2, *, pages: int = 40, page_size: int = 4, sequences: int = 8, ahead: int = 0, **options: Any
) -> Scheduler:
    model = tiny()
    cache = Cache(
        model.config,
        pages=pages,
        page_size=page_size,
        sequences=sequences,
        rows=k + 1,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    runner = PlainRunner(model, model)
    return Scheduler(runner, cache, FixedLength(k), executor=EagerExecutor(runner, cache, ahead), **options)


def request(prompt: Iterable[int], tokens: int = 10, **params: Any) -> Request:
    return Request(list(prompt), SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, **params}))


def finish(s: Scheduler, steps: int = 2000) -> dict[int, Running]:
    """Step until idle; everything that was reported."""
    found: dict[int, Running] = {}
    for _ in range(steps):
        if s.idle:
            return found
        found |= {r.index: r for r, _ in s.step()}
    raise AssertionError("the scheduler does not come to rest")


def alone(asked: Request, k: int = 2) -> Running:
    s = scheduler(k)
    s.add(asked)
    return finish(s)[0]


def untouched(s: Scheduler, pages: int = 40, sequences: int = 8) -> bool:
    """Whether every page and slot came back, once."""
    return sorted(s.cache.free_pages) == list(range(pages)) and sorted(s.cache.free_slots) == list(range(sequences))


@pytest.mark.parametrize("ahead", [0, 1])
def test_late_arrivals_join_running_batches(ahead: int) -> None:
    asked = [request([i, 3, 7 - i], 6 + 3 * i, temperature=0.7 * (i % 2), seed=i) for i in range(4)]
    s = scheduler(ahead=ahead)
    found: dict[int, Running] = {}
    for r in asked:
        s.add(r)
        found |= {x.index: x for x, _ in s.step() + s.step()}
    found |= finish(s)
    assert [found[i].tokens for i in range(4)] == [alone(r).tokens for r in asked]
    assert [found[i].rounds for i in range(4)] == [alone(r).rounds for r in asked]
    assert untouched(s)


@pytest.mark.parametrize("ahead", [0, 1])
def test_prompts_wait_for_their_budget_while_others_decode(ahead: int) -> None:
    """A long prompt enters a few rows a step; each step before its first token still runs a round."""
    s = scheduler(ahead=ahead, chunk=4, prompt_rows=5)
    first, long = request([1, 2], 60), request([i % VOCAB for i in range(50)], 3)
    s.add(first)
    finished = {r.index: r for r, _ in s.step() + s.step() + s.step()}
    s.add(long)
    gains = []
    while not finished.get(1):
        news = s.step()
        gains.append(sum(r.index == 0 and u.round is not None for r, u in news))
        finished |= {r.index: r for r, _ in news}
    assert len(gains) == 10 + ahead
    assert all(gain == 1 for gain in gains)
    finished |= finish(s)
    assert finished[0].tokens == alone(first).tokens
    assert finished[1].tokens == alone(long).tokens


@pytest.mark.parametrize("ahead", [0, 1])
def test_pages_run_out_and_nothing_is_lost(ahead: int) -> None:
    """Eight requests in a pool that holds about two: the youngest are paused, and go on where they were."""
    asked = [
        request([i, 5], 14, temperature=0.8 * (i % 2), seed=i, presence_penalty=0.4 * (i % 3), min_tokens=i)
        for i in range(8)
    ]
    s = scheduler(pages=12, ahead=ahead)
    for r in asked:
        s.add(r)
    found = finish(s)
    assert [found[i].tokens for i in range(8)] == [alone(r).tokens for r in asked]
    assert [found[i].rounds for i in range(8)] == [alone(r).rounds for r in asked]
    assert sum(r.pauses for r in found.values()) > 0
    assert found[0].pauses == 0
    assert untouched(s, 12)


def test_requests_finish_in_bounded_time_under_a_stream_of_others() -> None:
    """The first of a crowd ends no later than alone, however many press behind it."""
    s = scheduler(pages=12)
    s.add(request([4, 4], 20))
    steps = 0
    while True:
        s.add(request([steps % VOCAB] * 3, 8))
        steps += 1
        if any(r.index == 0 and r.finish for r, _ in s.step()):
            break
    assert steps <= 1 + len(alone(request([4, 4], 20)).rounds)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_cancelled_anywhere(ahead: int, steps: int) -> None:
    """Cancelled while it waits, in the middle of its prompt, between prompt and rounds, or in a round."""
    s = scheduler(ahead=ahead, chunk=3, prompt_rows=6)
    other, gone = request([1, 2], 12), request(range(9), 12)
    s.add(other)
    s.add(gone)
    found: dict[int, Running] = {}
    for _ in range(steps):
        found |= {r.index: r for r, _ in s.step()}
    s.cancel(1)
    before = len(found[1].tokens) if 1 in found else 0
    found |= finish(s)
    assert found[0].tokens == alone(other).tokens
    if 1 in found:
        assert (found[1].finish, len(found[1].tokens)) == ("cancelled", before)
        assert found[1].tokens == alone(gone).tokens[:before]
    assert untouched(s)


def test_refused_at_once() -> None:
    s = scheduler(pages=5)
    assert s.add(request([1], 15)) == 0
    with pytest.raises(NextnError, match="needs a cache of 21 positions; there are 20") as refused:
        s.add(request([1], 16))
    assert "max_tokens to 15" in (refused.value.fix or "")
    with pytest.raises(NextnError, match="needs a cache"):
        s.add(Request([1] * 16, SamplingParams(max_tokens=None)))
    with pytest.raises(NextnError, match="not in the vocabulary"):
        s.add(request([VOCAB]))
    with pytest.raises(NextnError, match="empty"):
        s.add(request([]))
    with pytest.raises(NextnError, match="logit_bias"):
        s.add(request([1], logit_bias={VOCAB: 1.0}))
    assert list(finish(s)) == [0]


def test_without_a_limit_the_pool_is_the_limit() -> None:
    s = scheduler(pages=5)
    s.add(Request([1], SamplingParams(temperature=0, max_tokens=None)))
    assert len(finish(s)[0].tokens) == 15


@pytest.mark.parametrize("ahead", [0, 1])
def test_broken_logits_end_one_request_alone(ahead: int) -> None:
    """Token 10 has an embedding of NaN: whoever meets it breaks, and leaves pages that others then use."""
    model = tiny()
    kept = model.embed.weight.data[10].clone()
    asked = [request([i, 3], 14, temperature=0.6 * (i % 2), seed=i, logit_bias={10: -100.0}) for i in range(6)]
    expected = [alone(r).tokens for r in asked]
    try:
        model.embed.weight.data[10] = torch.nan
        s = scheduler(pages=14, ahead=ahead)
        found: dict[int, Running] = {}
        for i, r in enumerate(asked):
            s.add(r)
            s.add(request([i, 10] if i % 2 else [10] * 9, 14))
            found |= {x.index: x for x, _ in s.step()}
        found |= finish(s)
    finally:
        model.embed.weight.data[10] = kept
    assert [found[2 * i].tokens for i in range(6)] == expected
    for i in range(6):
        broken = found[2 * i + 1]
        assert broken.finish == "error"
        assert broken.error is not None
        assert "NaN" in broken.error.what
        assert broken.tokens == []
    assert untouched(s, 14)


def test_a_round_thrown_away_is_not_counted() -> None:
    asked = request([1, 2, 3], 9, stop_token_ids=(alone(request([1, 2, 3], 9)).tokens[5],))
    early, late = scheduler(), scheduler(ahead=1)
    for s in (early, late):
        s.add(asked)
    a, b = finish(early)[0], finish(late)[0]
    assert (a.tokens, a.rounds, a.finish) == (b.tokens, b.rounds, b.finish)


def test_log_probabilities_come_with_their_tokens() -> None:
    s = scheduler(pages=12)
    asked = [request([i, 2], 12, logprobs=3 if i else None) for i in range(4)]
    for r in asked:
        s.add(r)
    found = finish(s)
    assert sum(r.pauses for r in found.values()) > 0
    assert found[0].logprobs == []
    for i in (1, 2, 3):
        expected = alone(asked[i]).logprobs
        assert [p.token for p in found[i].logprobs] == found[i].tokens
        for p, e in zip(found[i].logprobs, expected, strict=True):
            assert p.logprob == pytest.approx(e.logprob, abs=1e-9)
            assert [t for t, _ in p.top] == [t for t, _ in e.top]


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from((0.0, 0.7, 1.2)),
        "top_k": st.sampled_from((0, 3)),
        "top_p": st.sampled_from((1.0, 0.8)),
        "repetition_penalty": st.sampled_from((1.0, 1.4)),
        "presence_penalty": st.sampled_from((0.0, 0.6)),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-3, 3), max_size=3),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3),
        "min_tokens": st.integers(0, 4),
        "seed": st.just(1),
    }
)


@given(groups=st.lists(st.lists(OPTIONS, min_size=1, max_size=3), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_joined_sampling_states_are_those_built_together(groups: list[list[dict[str, Any]]], seed: int) -> None:
    """Bias, stops, counts and prompts of different widths: the probabilities of every request stay, to the last bit."""
    generator = torch.Generator().manual_seed(seed)

    def state(options: list[dict[str, Any]], first: int) -> SamplingState:
        params = [SamplingParams(**o) for o in options]
        prompts = [[(first + i) % VOCAB, 3] for i in range(len(params))]
        stops = [p.stop_ids(()) for p in params]
        built = SamplingState.build(params, prompts, vocab_size=VOCAB, stop_ids=stops)
        made = torch.tensor([[(7 * first + i) % VOCAB, 2] for i in range(len(params))])
        built.commit(made, torch.tensor([1 + (first + i) % 2 for i in range(len(params))]))
        return built

    firsts = [sum(map(len, groups[:i])) for i in range(len(groups))]
    joined = SamplingState.join([state(g, f) for g, f in zip(groups, firsts, strict=True)])
    flat = [o for g in groups for o in g]
    together = SamplingState.build(
        [SamplingParams(**o) for o in flat],
        [[i % VOCAB, 3] for i in range(len(flat))],
        vocab_size=VOCAB,
        stop_ids=[SamplingParams(**o).stop_ids(()) for o in flat],
    )
    rows = [(7 * f + i, f + i) for g, f in zip(groups, firsts, strict=True) for i in range(len(g))]
    together.commit(torch.tensor([[m % VOCAB, 2] for m, _ in rows]), torch.tensor([1 + n % 2 for _, n in rows]))
    logits = torch.randn(len(flat), 2, VOCAB, generator=generator, dtype=torch.float64)
    drafts = torch.randint(0, VOCAB, (len(flat), 1), generator=generator)
    expected = process(logits, together, drafts)
    assert torch.equal(process(logits, joined, drafts), expected)
    # A graph's state has columns of its own number; so has one whose widest requests have left.
    fitted = joined.fitted(joined.widths)
    assert (fitted.bias.shape[1], fitted.stop_ids.shape[1]) == joined.widths
    assert torch.equal(process(logits, fitted, drafts), expected)
    some = list(range(0, len(flat), 2))
    left = fitted.select(some)
    for state_left in (left, left.fitted(left.widths)):
        assert torch.equal(process(logits[some], state_left, drafts[some]), process(logits, together, drafts)[some])


@pytest.mark.parametrize("chunk", [0, MAX_CHUNK + 1])
def test_a_chunk_whose_elements_the_kernels_cannot_number_is_refused(chunk: int) -> None:
    with pytest.raises(NextnError, match=f"chunk is {chunk}"):
        Engine(tiny(), chunk=chunk)
    assert MAX_CHUNK * 65535 < 1 << 31


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.lists(st.integers(1, 30), max_size=3),
    st.sampled_from((None, 1, 5, 16)),
)
def test_alone_each_prompt_is_cut_at_the_same_places_whatever_else_there_is(
    first: list[int], later: list[int], prompt_rows: int | None
) -> None:
    s = scheduler(pages=80, sequences=4, chunk=7, prompt_rows=prompt_rows, alone=True)
    ran: list[tuple[int, int, int]] = []
    plain = s._forward

    def forward(members: list[Running], rows: int, last: bool, again: bool) -> None:
        (one,) = members
        ran.append((one.index, one.fed, rows))
        plain(members, rows, last, again)

    s._forward = forward  # type: ignore[method-assign]
    asked = [request([i % VOCAB] * n, 4) for i, n in enumerate([*first, *later])]
    for r in asked[: len(first)]:
        s.add(r)
    found = {r.index: r for r, _ in s.step()}
    for r in asked[len(first) :]:
        s.add(r)
    found |= finish(s)
    for i, r in enumerate(asked):
        n = len(r.prompt)
        assert [(at, rows) for index, at, rows in ran if index == i] == [(at, min(7, n - at)) for at in range(0, n, 7)]
        assert found[i].tokens == alone(r).tokens


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_without_a_finite_best_end_one_request_alone(value: float, temperature: float) -> None:
    """Of an infinite embedding's row, or where nothing is left to choose."""
    asked = [request([i, 3], 9, temperature=temperature, seed=i) for i in range(4)]
    expected = [alone(r).tokens for r in asked]
    s = scheduler()
    plain = s.runner.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        out = plain(hidden)
        if out.shape[0] == 4:
            out[2] = value if value < 0 else out[2].index_fill(-1, torch.tensor([5]), value)
        return out

    s.runner.logits = logits  # type: ignore[method-assign]
    for r in asked:
        s.add(r)
    found = finish(s)
    assert found[2].finish == "error"
    assert found[2].error is not None
    assert "infinite" in found[2].error.what
    assert [found[i].tokens for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]


def test_a_step_that_runs_out_of_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler()
    s.add(request([1, 2]))

    def short(hidden: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(s.runner, "logits", short)
    with pytest.raises(NextnError, match="memory ran out while decoding"):
        s.step()


@pytest.mark.parametrize("prompt", [["a"], [1.5], [True], [None], [1, -1], [VOCAB]])
def test_prompts_that_are_no_ids_are_refused(prompt: list[Any]) -> None:
    with pytest.raises(NextnError, match="is not in the vocabulary of 11"):
        scheduler().add(Request(prompt, SamplingParams(temperature=0.0)))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"draft_tokens": "auto"}, "draft_tokens is 'auto'"),
        ({"draft_tokens": 1.5}, "draft_tokens is 1.5"),
        ({"draft_tokens": True}, "draft_tokens is True"),
        ({"draft_tokens": 9}, "draft_tokens is 9"),
        ({"cache_bytes": "x"}, "cache_bytes is 'x'"),
        ({"cache_bytes": -1}, "cache_bytes is -1"),
        ({"graphs": True}, "CUDA graphs do not run on cpu"),
    ],
)
def test_engines_refuse_what_they_cannot_take(options: dict[str, Any], what: str) -> None:
    with pytest.raises(NextnError, match=what):
        Engine(tiny(), **options)


@pytest.mark.parametrize("rooms", [[], [64.5], [0], [True], [10, -1], ["a"]])
def test_pools_of_no_size_are_refused(rooms: list[Any]) -> None:
    with pytest.raises(NextnError, match="Give the positions of at least one sequence"):
        Engine(tiny()).scheduler(rooms)
