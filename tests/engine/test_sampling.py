"""Sampling and acceptance: exact properties, and chi-square tests that the tokens follow the target's distribution."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from nextn.engine.logits import SamplingState, process
from nextn.engine.params import SamplingParams
from nextn.engine.random import ACCEPT, DRAFT, DRAW, LANES, uniforms
from nextn.engine.sampling import accept, accept_greedy, sample, token_logprobs

SIGNIFICANCE = 1e-3
RUNS = 50_000

# -- drawing one token ------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9).filter(any), st.integers(0, 2**53 - 1))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(weights: list[int], numerator: int) -> None:
    u = numerator / 2**53
    id = int(sample(torch.tensor(weights, dtype=torch.float64), torch.tensor(u, dtype=torch.float64)))
    assert weights[id] > 0
    assert sum(weights[:id]) <= u * sum(weights) < sum(weights[: id + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_unit_interval(dtype: torch.dtype) -> None:
    probs = torch.tensor([0.0, 0.1, 0.0, 0.9, 0.0], dtype=dtype)
    draws = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(probs.expand(2, 5), draws).tolist() == [1, 3]


def test_a_long_tail_in_float32_is_not_lost() -> None:
    # Added to 1 one after the other in float32, these steps would all be rounded away.
    width = 200_000
    probs = torch.full((width,), 1e-8, dtype=torch.float32)
    probs[0] = 1
    goal = 1 + 1e-8 * torch.tensor([0.5, 1000.5, 99_999.5, 199_990.5], dtype=torch.float64)
    ids = sample(probs.expand(4, width), goal / (1 + 1e-8 * (width - 1)))
    assert (ids - torch.tensor([1, 1001, 100_000, 199_991])).abs().max() <= 1


def test_a_sum_that_steps_up_at_an_impossible_id_still_gives_a_possible_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rounding may make it where a device adds in parallel."""
    bump = torch.tensor([0.25, 0.25 + 1e-16, 0.3, 1.0], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda *_, **__: bump.expand(1, 4))
    probs = torch.tensor([[0.25, 0.0, 0.0, 0.75]])
    assert sample(probs, torch.tensor([0.27], dtype=torch.float64)).tolist() == [3]


# -- acceptance: exact properties -------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 10**6))
def test_greedy_acceptance_is_the_common_prefix(batch: int, steps: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    choices = torch.randint(0, 2, (batch, steps + 1), generator=g)
    drafts = torch.randint(0, 2, (batch, steps), generator=g)
    tokens, accepted = accept_greedy(choices, drafts)
    for b in range(batch):
        wanted, proposed = choices[b].tolist(), drafts[b].tolist()
        count = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(wanted, proposed, strict=False))))
        assert accepted[b] == count
        assert tokens[b, : count + 1].tolist() == [*proposed[:count], wanted[count]]


def random_probs(*shape: int, seed: int, sparse: bool = False) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    probs = (torch.randn(*shape, generator=g, dtype=torch.float64) * 1.5).softmax(-1)
    if sparse:
        probs = probs * (torch.rand(*shape, generator=g) < 0.5)
        probs[..., 0] += 0.1
    return probs / probs.sum(-1, keepdim=True)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6), st.booleans())
def test_acceptance_follows_the_rule_row_by_row(batch: int, steps: int, seed: int, sparse: bool) -> None:
    p = random_probs(batch, steps + 1, 6, seed=seed, sparse=sparse)
    q = random_probs(batch, steps, 6, seed=seed + 1, sparse=sparse)
    draws = uniforms(torch.arange(batch) + seed, torch.arange(steps + 1).expand(batch, -1))
    drafts = sample(q, draws[:, :-1, DRAFT])
    tokens, accepted = accept(p, drafts, q, draws)
    for b in range(batch):
        count = 0
        while count < steps:
            d = drafts[b, count]
            if draws[b, count, ACCEPT] >= min(1.0, (p[b, count, d] / q[b, count, d]).item()):
                break
            count += 1
        law = p[b, count] if count == steps else (p[b, count] - q[b, count]).clamp(min=0)
        assert accepted[b] == count
        assert tokens[b, :count].tolist() == drafts[b, :count].tolist()
        assert tokens[b, count] == sample(law, draws[b, count, DRAW])
        assert ((tokens[b] >= 0) & (tokens[b] < 6)).all()
        if count < steps:
            # The refused draft cannot come back, and what is drawn is possible for the target.
            assert tokens[b, count] != drafts[b, count]
        assert p[b, count, tokens[b, count]] > 0


@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 10**6))
def test_drafts_without_chance_give_the_tokens_of_plain_decoding(batch: int, steps: int, seed: int) -> None:
    p = random_probs(batch, steps + 1, 3, seed=seed)
    drafts = p[:, :-1].argmax(-1)
    draws = uniforms(torch.arange(batch), 5 + torch.arange(steps + 1).expand(batch, -1))
    tokens, accepted = accept(p, drafts, None, draws)
    for b in range(batch):
        for row in range(int(accepted[b]) + 1):
            number = uniforms(torch.tensor([b]), torch.tensor([5 + row]))[0, DRAW]
            assert tokens[b, row] == sample(p[b, row], number)
        stopped = int(accepted[b]) < steps
        assert not stopped or tokens[b, accepted[b]] != drafts[b, accepted[b]]


def test_greedy_rows_are_accepted_as_greedy_decoding_does() -> None:
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    state = SamplingState.build([SamplingParams(temperature=0)] * 2, [[0]] * 2, vocab_size=9)
    p = process(logits, state)
    best = logits.argmax(-1)
    drafts = best[:, :-1].clone()
    drafts[1, 1] = (drafts[1, 1] + 1) % 9
    draws = uniforms(state.seed, torch.arange(4).expand(2, -1))
    q = torch.zeros(2, 3, 9, dtype=torch.float64).scatter_(-1, drafts.unsqueeze(-1), 1)
    for given_q in (q, random_probs(2, 3, 9, seed=3), None):
        tokens, accepted = accept(p, drafts, given_q, draws)
        assert accepted.tolist() == [3, 1]
        assert tokens[0].tolist() == best[0].tolist()
        assert tokens[1, :2].tolist() == best[1, :2].tolist()


def test_equal_distributions_accept_everything_and_draw_the_bonus_from_the_target() -> None:
    p = random_probs(50, 4, 5, seed=7)
    draws = uniforms(torch.arange(50), torch.arange(4).expand(50, -1))
    drafts = sample(p[:, :-1], draws[:, :-1, DRAFT])
    tokens, accepted = accept(p, drafts, p[:, :-1], draws)
    assert accepted.tolist() == [3] * 50
    assert torch.equal(tokens[:, 3], sample(p[:, 3], draws[:, 3, DRAW]))


def test_an_empty_residual_falls_back_to_the_target() -> None:
    # Not normalised: q covers p everywhere, so nothing is left over, and p still decides.
    p = torch.tensor([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[1.0, 0.5, 0.5]]])
    draws = torch.tensor([[[0.5, 0.9, 0.5], [0.5, 0.5, 0.5]]], dtype=torch.float64)
    tokens, accepted = accept(p, torch.tensor([[0]]), q, draws)
    assert accepted.tolist() == [0]
    assert tokens[0, 0] == 2


def test_no_drafts() -> None:
    p = random_probs(3, 1, 5, seed=2)
    draws = uniforms(torch.arange(3), torch.zeros(3, 1, dtype=torch.long))
    for q in (None, torch.zeros(3, 0, 5)):
        tokens, accepted = accept(p, torch.zeros(3, 0, dtype=torch.long), q, draws)
        assert accepted.tolist() == [0, 0, 0]
        assert tokens.shape == (3, 1)


# -- acceptance: the distribution -------------------------------------------------------------------

Accept = Callable[[Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]

REQUESTS = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=1.8),
    "top_p": SamplingParams(temperature=1.1, top_p=0.75),
    "top_k": SamplingParams(top_k=3),
    "min_p": SamplingParams(temperature=1.2, min_p=0.2),
    "all": SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05, presence_penalty=0.7),
}


class Chain:
    """A target and a head over a small vocabulary whose logits depend on the token before, and on the position."""

    def __init__(self, width: int, params: SamplingParams, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.width, self.params = width, params
        self.target = torch.randn(4, width, width, generator=g, dtype=torch.float64) * 1.5
        self.head = self.target + torch.randn(4, width, width, generator=g, dtype=torch.float64)

    def state(self, runs: int) -> SamplingState:
        state = SamplingState.build([self.params], [[0]], vocab_size=self.width).select([0] * runs)
        state.seed = torch.arange(runs)
        return state

    def exact(self, length: int) -> np.ndarray:
        """Probability of each run of `length` tokens under plain decoding: [V] * length."""
        out = np.zeros((self.width,) * length)
        for tokens in itertools.product(range(self.width), repeat=length):
            state, chance, last = self.state(1), 1.0, 0
            for n, token in enumerate(tokens):
                chance *= process(self.target[n, last].view(1, 1, -1), state)[0, 0, token].item()
                if chance == 0:
                    break
                state.commit(torch.tensor([[token]]), torch.ones(1, dtype=torch.long))
                last = token
            out[tokens] = chance
        return out

    def run(self, length: int, steps: int, rule: Accept, sampled: bool) -> Tensor:
        """Decode `length` tokens RUNS times in rounds of `steps` drafts: [RUNS, length]."""
        state, last = self.state(RUNS), torch.zeros(RUNS, dtype=torch.long)
        done = torch.zeros(RUNS, dtype=torch.long)
        out = torch.zeros(RUNS, length + 2 * steps + 1, dtype=torch.long)
        for _ in range(length):
            place = done.unsqueeze(-1) + torch.arange(steps + 1)
            draws = uniforms(state.seed, place)
            table = place.clamp(max=3)
            drafts, laws, before = torch.zeros(RUNS, 0, dtype=torch.long), [], last
            for j in range(steps):
                q = process(self.head[table[:, j], before].unsqueeze(1), state, drafts, first_row=j)
                before = sample(q[:, 0], draws[:, j, DRAFT]) if sampled else q[:, 0].argmax(-1)
                drafts, laws = torch.cat([drafts, before.unsqueeze(-1)], 1), [*laws, q]
            rows = torch.cat([last.unsqueeze(-1), drafts], 1)
            p = process(self.target[table, rows], state, drafts)
            tokens, accepted = rule(p, drafts, torch.cat(laws, 1) if sampled else None, draws)
            assert 0.02 < (accepted > 0).double().mean() < 0.999
            going = done < length
            lengths = torch.where(going, accepted + 1, 0)
            state.commit(tokens, lengths)
            write = torch.arange(steps + 1) < lengths.unsqueeze(-1)
            out.scatter_(1, place, torch.where(write, tokens, out.gather(1, place)))
            last = torch.where(going, tokens.gather(1, accepted.unsqueeze(-1)).squeeze(-1), last)
            done = done + lengths
            if (done >= length).all():
                break
        return out[:, :length]


def p_value(runs: Tensor, exact: np.ndarray) -> float:
    """Chi-square of the runs against their exact probabilities; cells expecting under 8 runs are pooled."""
    length = runs.shape[1]
    cell = np.ravel_multi_index(tuple(runs.numpy().T), exact.shape)
    observed = np.bincount(cell, minlength=exact.size).astype(float)
    expected = exact.ravel() * len(runs)
    assert length == exact.ndim
    assert observed[expected == 0].sum() == 0
    rare = (expected < 8) & (expected > 0)
    observed = np.append(observed[expected >= 8], observed[rare].sum())
    expected = np.append(expected[expected >= 8], expected[rare].sum())
    if expected[-1] < 8:
        observed, expected = (
            np.append(observed[:-2], observed[-2:].sum()),
            np.append(expected[:-2], expected[-2:].sum()),
        )
    return float(stats.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled-drafts", "greedy-drafts"])
@pytest.mark.parametrize("name", REQUESTS)
def test_tokens_follow_the_target_whatever_the_head_proposes(name: str, sampled: bool) -> None:
    chain = Chain(width=7, params=REQUESTS[name], seed=11)
    exact = chain.exact(3)
    assert abs(exact.sum() - 1) < 1e-9
    for steps in (1, 3):
        assert p_value(chain.run(3, steps, accept, sampled), exact) > SIGNIFICANCE


def test_a_larger_vocabulary() -> None:
    chain = Chain(width=12, params=SamplingParams(temperature=0.9, top_p=0.95), seed=5)
    assert p_value(chain.run(2, 2, accept, True), chain.exact(2)) > SIGNIFICANCE


def wrong_bonus(p: Tensor, drafts: Tensor, q: Tensor | None, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Draws the token in place of a refused draft from the target instead of the residual."""
    assert q is not None
    tokens, accepted = accept(p, drafts, q, draws)
    row = torch.arange(len(tokens))
    tokens = tokens.clone()
    tokens[row, accepted] = sample(p[row, accepted], draws[row, accepted, DRAW])
    return tokens, accepted


def wrong_ratio(p: Tensor, drafts: Tensor, q: Tensor | None, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts with the target's probability alone, not over the draft's."""
    assert q is not None
    used = draws.clone()
    used[:, :-1, ACCEPT] /= q.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    return accept(p, drafts, q, used)


def wrong_numbers(p: Tensor, drafts: Tensor, q: Tensor | None, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Tests a draft with the number that drew it."""
    used = draws.clone()
    used[..., ACCEPT] = draws[..., DRAFT]
    return accept(p, drafts, q, used)


@pytest.mark.parametrize("rule", [wrong_bonus, wrong_ratio, wrong_numbers])
def test_wrong_rules_are_caught(rule: Accept) -> None:
    chain = Chain(width=7, params=REQUESTS["temperature"], seed=11)
    assert p_value(chain.run(3, 3, rule, True), chain.exact(3)) < SIGNIFICANCE


# -- reported probabilities -------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    chosen, ids, logs = token_logprobs(logits, tokens, 4)
    x = logits.numpy()
    exact = x - np.log(np.exp(x).sum(-1, keepdims=True))
    for b, t in itertools.product(range(2), range(3)):
        assert chosen[b, t].item() == pytest.approx(exact[b, t, tokens[b, t]])
        order = sorted(range(11), key=lambda i: -exact[b, t, i])[:4]
        assert ids[b, t].tolist() == order
        assert logs[b, t].tolist() == pytest.approx([exact[b, t, i] for i in order])


def test_logprobs_of_half_precision_are_computed_in_float32() -> None:
    logits = torch.linspace(-3, 3, 50).bfloat16()
    chosen, _, logs = token_logprobs(logits, torch.tensor(7), 2)
    exact = logits.double().log_softmax(-1)
    assert chosen.item() == pytest.approx(exact[7].item(), rel=1e-6)
    assert logs.tolist() == pytest.approx(exact[[49, 48]].tolist(), rel=1e-6)


def test_more_logprobs_than_ids() -> None:
    assert token_logprobs(torch.zeros(1, 3), torch.tensor([0]), 20)[1].shape == (1, 3)


def test_a_position_has_one_number_a_use() -> None:
    assert sorted([ACCEPT, DRAW, DRAFT]) == list(range(LANES))
