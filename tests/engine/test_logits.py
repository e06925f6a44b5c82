"""Logits to probabilities: against transformers' processors, independent numpy, and plain decoding row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from nextn.engine.logits import SamplingState, adjust, process
from nextn.engine.params import SamplingParams
from nextn.errors import NextnError

V = 40


def make(
    params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]] | None = None, vocab: int = V, **options: Any
) -> SamplingState:
    return SamplingState.build(params, prompts or [[0]] * len(params), vocab_size=vocab, **options)


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3).to(dtype)


def oracle(logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int] = ()) -> torch.Tensor:
    """transformers' processors in the fixed order. logits: [N, V]."""
    chain = hf.LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        chain.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        chain.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(hf.MinPLogitsWarper(params.min_p))
    ids = torch.tensor([list(prompt)] * len(logits), dtype=torch.long)
    return chain(ids, logits.clone()).softmax(-1)


samplers = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 2.5),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    top_k=st.one_of(st.just(0), st.integers(1, V + 5)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
)


@given(st.lists(samplers, min_size=1, max_size=5), st.integers(0, 10**6))
def test_a_batch_of_different_requests_equals_transformers_one_by_one(batch: list[SamplingParams], seed: int) -> None:
    logits = random_logits(len(batch), 3, V, seed=seed)
    prompts = [[(seed + 7 * row + n) % V for n in range(4)] for row in range(len(batch))]
    probs = process(logits, make(batch, prompts))
    for row, params in enumerate(batch):
        expected = oracle(logits[row], params, prompts[row])
        torch.testing.assert_close(probs[row], expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(probs[row] > 0, expected > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    logits = random_logits(1, 2, V, dtype=dtype)
    probs = process(logits, make([SamplingParams(temperature=0.7, top_k=9, top_p=0.8)]))
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = oracle(logits[0].double(), SamplingParams(temperature=0.7, top_k=9, top_p=0.8))
    torch.testing.assert_close(probs[0].double(), expected, rtol=1e-5, atol=1e-7)


def numpy_filter(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row by sets and loops. Ties: top-k keeps them all, top-p keeps the lowest ids."""
    x = logits / params.temperature
    kept = set(range(len(x)))
    if params.top_k > 0:
        kth = sorted(x, reverse=True)[min(params.top_k, len(x)) - 1]
        kept = {i for i in kept if x[i] >= kth}
    mass = {i: float(np.exp(x[i] - x.max())) for i in kept}
    if params.top_p < 1:
        total, taken, chosen = sum(mass.values()), 0.0, set()
        for i in sorted(kept, key=lambda i: (-x[i], i)):
            if taken >= params.top_p * total:
                break
            chosen.add(i)
            taken += mass[i]
        kept = chosen
    kept = {i for i in kept if mass[i] >= params.min_p * max(mass.values())}
    out = np.zeros(len(x))
    for i in kept:
        out[i] = mass[i]
    return out / out.sum()


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, -1.0]), min_size=6, max_size=12),
    st.integers(0, 8),
    # Not near a multiple of a tie's mass: exact sums decide the same way in both.
    st.sampled_from([1.0, 0.313, 0.517, 0.771, 0.913]),
    st.sampled_from([0.0, 0.05, 0.2, 0.5]),
    st.integers(0, 6),
)
def test_ties(values: list[float], top_k: int, top_p: float, min_p: float, other_top_k: int) -> None:
    width = len(values)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    other = SamplingParams(top_k=other_top_k)
    logits = torch.tensor(values, dtype=torch.float64)
    probs = process(logits.expand(2, 1, width), make([params, other], vocab=width))
    np.testing.assert_allclose(probs[0, 0].numpy(), numpy_filter(logits.numpy(), params), atol=1e-12)
    np.testing.assert_allclose(probs[1, 0].numpy(), numpy_filter(logits.numpy(), other), atol=1e-12)


def test_flat_logits_keep_the_share_asked_for() -> None:
    probs = process(torch.zeros(1, 1, 1000), make([SamplingParams(top_p=0.25)], vocab=1000))[0, 0]
    assert (probs > 0).nonzero().flatten().tolist() == list(range(250))


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("other", [SamplingParams(), SamplingParams(top_k=7, top_p=0.5), SamplingParams(temperature=0)])
def test_a_wide_vocabulary(monkeypatch: pytest.MonkeyPatch, spread: float, other: SamplingParams) -> None:
    """A few of the largest logits decide as all of them do, where they can and where they cannot."""
    batch, width = [SamplingParams(top_p=0.9), other], 3000
    logits = random_logits(2, 2, width) * spread / 3
    logits[:, :, ::7] = logits.amax(-1, keepdim=True) - 1
    got = process(logits, make(batch, vocab=width))
    monkeypatch.setattr("nextn.engine.logits.FEW", width)
    assert torch.equal(process(logits, make(batch, vocab=width)), got)
    for row, params in enumerate(batch):
        if not params.greedy:
            np.testing.assert_allclose(got[row, 1].numpy(), numpy_filter(logits[row, 1].numpy(), params), atol=1e-12)


def test_greedy_requests_mix_with_sampled_ones() -> None:
    logits = random_logits(3, 2, V)
    logits[0, 0, 5] = logits[0, 0, 31] = logits.max() + 1
    batch = [
        SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=0.5),
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(temperature=0),
    ]
    probs = process(logits, make(batch))
    assert probs[0, 0, 5] == 1  # the lowest id of a tie
    for row in (0, 2):
        assert torch.equal(probs[row].argmax(-1), logits[row].argmax(-1))
        assert (probs[row] > 0).sum(-1).tolist() == [1, 1]
    torch.testing.assert_close(probs[1], oracle(logits[1], batch[1]))
    greedy = process(logits[:1], make(batch[:1]))
    assert torch.equal(greedy, probs[:1])


def test_extreme_temperatures_and_masked_ids_stay_finite() -> None:
    logits = random_logits(2, 1, V, dtype=torch.float32)
    logits[:, :, 3] = -torch.inf
    best = logits.argmax(-1)
    cold, hot = process(logits, make([SamplingParams(temperature=1e-5, top_p=0.9), SamplingParams(temperature=1e30)]))
    assert cold[0, best[0, 0]] == 1
    assert cold.sum() == 1
    assert hot[0, 3] == 0
    torch.testing.assert_close(hot[0][torch.arange(V) != 3], torch.full((V - 1,), 1 / (V - 1)))


def plain(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Penalties, bias and minimum length of one row by a loop over the vocabulary."""
    out = logits.copy()
    for id in range(len(out)):
        if id in prompt or id in output:
            r = params.repetition_penalty
            out[id] = out[id] / r if out[id] > 0 else out[id] * r
        out[id] -= params.frequency_penalty * output.count(id) + params.presence_penalty * (id in output)
        out[id] += params.logit_bias.get(id, 0)
        if len(output) < params.min_tokens and id in params.stop_ids([0]):
            out[id] = -np.inf
    return out


small = st.integers(0, 7)
adjusters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.3]),
    logit_bias=st.dictionaries(small, st.floats(-5, 5), max_size=3),
    stop_token_ids=st.lists(small, max_size=2),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 8),
)


@given(st.lists(adjusters, min_size=1, max_size=4), st.integers(0, 4), st.integers(0, 10**6), st.data())
def test_rows_of_verify_equal_plain_decoding(
    batch: list[SamplingParams], steps: int, seed: int, data: st.DataObject
) -> None:
    """Each row of one verify against a loop, and bit for bit against one row with the drafts committed."""
    rows, width = len(batch), 8
    ids = [data.draw(st.lists(small, min_size=n, max_size=n)) for n in [5] * rows + [3] * rows + [steps] * rows]
    prompts, outputs, drafts = ids[:rows], ids[rows : 2 * rows], ids[2 * rows :]
    logits = random_logits(rows, steps + 1, width, seed=seed)
    lengths = [data.draw(st.integers(0, 3)) for _ in batch]

    def state() -> SamplingState:
        stops = [p.stop_ids([0]) for p in batch]
        fresh = SamplingState.build(batch, prompts, vocab_size=width, stop_ids=stops)
        fresh.commit(torch.tensor(outputs), torch.tensor(lengths))
        return fresh

    proposed = torch.tensor(drafts, dtype=torch.long).view(rows, steps)
    before = state()
    got = adjust(logits, before, proposed)
    probs = process(logits, before, proposed)
    stepping = state()
    for row in range(steps + 1):
        for b, params in enumerate(batch):
            expected = plain(logits[b, row].numpy(), params, prompts[b], outputs[b][: lengths[b]] + drafts[b][:row])
            np.testing.assert_allclose(got[b, row].numpy(), expected, rtol=1e-12, atol=1e-12)
        one = logits[:, row : row + 1]
        assert torch.equal(adjust(one, stepping)[:, 0], got[:, row])
        assert torch.equal(process(one, stepping)[:, 0], probs[:, row])
        # A draft step that stands for this row, nothing committed.
        assert torch.equal(process(one, before, proposed[:, :row], first_row=row)[:, 0], probs[:, row])
        if row < steps:
            stepping.commit(proposed[:, row : row + 1], torch.ones(rows, dtype=torch.long))


def test_a_batch_that_loses_requests_keeps_the_others() -> None:
    batch = [SamplingParams(seed=n, presence_penalty=n / 4, top_k=n) for n in range(4)]
    prompts = [[n] for n in range(4)]
    whole = make(batch, prompts)
    whole.commit(torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), torch.tensor([2, 1, 2, 0]))
    logits = random_logits(4, 1, V)
    kept = whole.select([3, 1])
    assert kept.plan.largest == 3
    assert kept.seed.tolist() == [3, 1]
    assert kept.generated.tolist() == [0, 1]
    assert torch.equal(process(logits[[3, 1]], kept), process(logits, whole)[[3, 1]])
    assert not whole.select([0]).plan.penalties


def test_counts_are_only_kept_where_penalties_are_in_use() -> None:
    assert make([SamplingParams()]).counts.shape == (1, 0)
    assert make([SamplingParams(frequency_penalty=0.1)]).counts.shape == (1, V)
    assert make([SamplingParams(frequency_penalty=0.1)]).in_prompt.shape == (1, 0)
    assert make([SamplingParams(repetition_penalty=1.1)]).in_prompt.shape == (1, V)
    logits = random_logits(1, 1, V)
    assert adjust(logits, make([SamplingParams(temperature=0.3, top_k=4)])) is logits


def test_requests_without_a_seed_differ() -> None:
    assert len(set(make([SamplingParams()] * 8).seed.tolist())) == 8


def test_bias_outside_the_vocabulary() -> None:
    with pytest.raises(NextnError, match=f"id {V}, and the vocabulary has {V}"):
        make([SamplingParams(logit_bias={V: 1.0})])


@settings(max_examples=20)
@given(st.lists(samplers, min_size=1, max_size=6), st.integers(0, V))
def test_no_more_is_sorted_than_the_filters_need(batch: list[SamplingParams], top_k: int) -> None:
    limits = [p.top_k for p in batch]
    expected = min(max(limits), V)
    if any(p.top_p < 1 and p.top_k == 0 for p in batch):
        expected = V
    assert make(batch).plan.largest == expected
