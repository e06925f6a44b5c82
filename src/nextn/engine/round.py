"""One round: verify, accept, extend, and the further draft steps (design: index arithmetic).

With committed length L and bonus x_L, verify runs [x_L, d1..dK] at positions L..L+K. The target's own choices t_i
accept a leading drafts; t_a is the new bonus. The extend runs the head over the same positions with the embeddings
of t_i and the target's hidden states, overwriting the draft cache; its row a gives d1. The other drafts come from
single-row steps at positions L+a+1, L+a+2, ..., each from the draft just made and the recycled hidden state.

Nothing here synchronises with the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.contexts import Rows
from nextn.engine.runner import Runner
from nextn.engine.sampling import DRAFT, adjust, broken_logits


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round decided.

    Attributes:
        tokens: [batch, K + 1]; the first accepted + 1 of a row are new.
        accepted: [batch], how many draft tokens were kept.
        drafts: [batch, K], what was verified.
        logits: [batch, K + 1, vocab] of the target.
        broken: [batch] bool, as `broken_logits` of the target's logits.
        outcome: tokens, accepted, drafts and broken as `sampling.settle` lays them side by side for the host.
    """

    tokens: Tensor
    accepted: Tensor
    drafts: Tensor
    logits: Tensor
    broken: Tensor
    outcome: Tensor


def decode_round(runner: Runner, cache: Cache, batch: Batch) -> RoundResult:
    """Run a round and move the batch on, in place.

    Args:
        runner: executes the forwards of the target and of whatever drafts.
        cache: the pools.
        batch: sequences of K draft tokens each; K = 0 is plain decoding. Where the batch carries head states, the
            extend runs at K = 0 too: the draft cache stays complete, so that a later round may draft again.
    """
    k = batch.draft_tokens
    rows = torch.cat((batch.bonus[:, None], batch.drafts), 1) if k else batch.bonus[:, None]
    positions = batch.lengths[:, None] + cache.offsets[: k + 1]
    where = Rows(cache, batch.table, positions, batch.bound + k + 1, batch.slots, batch.committed)
    # Older than the chain of kernels, some of which read it before they wait for those ahead; and not copied again.
    where.first = batch.lengths
    where.settled = before = batch.lengths
    post, pre = runner.target_rows(rows, where)
    logits = runner.logits(post)
    tokens, accepted, broken = _accept(runner, logits, batch, positions)
    settled = runner.settle(batch.lengths, tokens, accepted, batch.drafts, broken)
    result = RoundResult(tokens, accepted, batch.drafts, logits, broken, settled.outcome)
    batch.sampling.commit(tokens, settled.kept)
    batch.lengths, batch.committed, batch.bonus = settled.lengths, settled.kept, settled.bonus
    batch.bound += k + 1
    if batch.head_out is not None:
        out, recycled = runner.head_rows(tokens, runner.target.head_hidden(post, pre), where)
        batch.head_out = _row(out, accepted)
        batch.head_hidden = batch.head_out if recycled is out else _row(recycled, accepted)
        draft(runner, cache, batch, k, before)
    return result


def draft(runner: Runner, cache: Cache, batch: Batch, k: int, settled: Tensor | None = None) -> None:
    """Draft k tokens anew from the head states that the batch carries, in place; `settled` as in `Rows`."""
    assert batch.head_out is not None
    assert batch.head_hidden is not None
    batch.drafts, batch.draft_probs = draft_tokens(
        runner, cache, batch, batch.head_out, batch.head_hidden, k, bound=batch.bound + max(k - 1, 0), settled=settled
    )


def set_draft_tokens(runner: Runner, cache: Cache, batch: Batch, k: int) -> None:
    """Give the batch k draft tokens for its next round, in place: the first of those it has, or k new ones.

    Drafting again gives the same first tokens: they depend on the head states and on each position's own random
    number.
    """
    if k > batch.draft_tokens:
        draft(runner, cache, batch, k)
    elif k < batch.draft_tokens:
        batch.drafts = batch.drafts[:, :k]
        batch.draft_probs = batch.draft_probs[:, :k] if batch.draft_probs is not None else None


def draft_tokens(
    runner: Runner,
    cache: Cache,
    batch: Batch,
    out: Tensor,
    recycled: Tensor,
    k: int,
    *,
    bound: int,
    settled: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """d1..dK from the extend's row and K - 1 single-row steps; writes only the draft pool.

    Args:
        batch: already moved on: lengths count the kept rows, the bonus is the new one.
        out, recycled: [batch, 1, hidden] of the head at the last committed position.
        bound: keys to look at.
        settled: as in `Rows`.
    Returns:
        (drafts [batch, K], the probabilities they were drawn from [batch, K, vocab] or None when all are greedy).
    """
    drafts = token = batch.lengths.new_empty((batch.size, 0))
    state, each = batch.sampling, list[Tensor]()
    ahead = batch.lengths + cache.offsets[: k - 1, None] if k > 1 else batch.lengths[None]
    probs: list[Tensor] = []
    for step in range(k):
        if step:
            where = Rows(cache, batch.table, ahead[step - 1][:, None], bound, batch.slots, batch.committed)
            where.settled = settled
            out, recycled = runner.head_rows(token, recycled, where, step)
        token, law = _draft(runner, runner.draft_logits(out), batch, drafts)
        each.append(token)
        if step == k - 1 or not state.plan.all_greedy or state.plan.adjusts:
            drafts = torch.cat(each, 1) if step else token
        if law is not None:
            probs.append(law)
    return drafts, torch.cat(probs, 1) if probs else None


def _accept(runner: Runner, logits: Tensor, batch: Batch, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, accepted, broken) as in `RoundResult`."""
    state = batch.sampling
    if state.plan.all_greedy:
        if state.plan.adjusts:
            logits = adjust(logits, state, batch.drafts)
        return runner.accept_best(logits, batch.drafts)
    probs = runner.process(logits, state, batch.drafts)
    tokens, accepted = runner.accept(probs, batch.drafts, batch.draft_probs, runner.uniforms(state.seed, positions + 1))
    return tokens, accepted, broken_logits(logits)


def _draft(runner: Runner, logits: Tensor, batch: Batch, drafts: Tensor) -> tuple[Tensor, Tensor | None]:
    """One draft token a sequence from head logits [batch, 1, vocab], processed as the target's row will be."""
    state, before = batch.sampling, drafts.shape[1]
    if state.plan.all_greedy:
        if state.plan.adjusts:
            logits = adjust(logits, state, drafts, before)
        return runner.best(logits), None
    law = runner.process(logits, state, drafts, before)
    return runner.sample(law, runner.uniforms(state.seed, batch.lengths + before + 1)[:, None, DRAFT]), law


def _row(x: Tensor, at: Tensor) -> Tensor:
    """Row at[b] of x [batch, rows, hidden] -> [batch, 1, hidden]."""
    return x.gather(1, at[:, None, None].expand(-1, 1, x.shape[-1]))
