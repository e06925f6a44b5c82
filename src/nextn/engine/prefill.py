"""Prefill: run prompts through target and head in chunks, and take the first tokens and their drafts.

The head's row at position t needs token t + 1: the last row of a chunk that is not the last takes the next prompt
token; the prompt's last row takes the token that the target just gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.contexts import Rows
from nextn.engine.round import RoundResult, draft_tokens
from nextn.engine.runner import Runner
from nextn.engine.sampling import DRAW, SamplingState, adjust, process, sample, uniforms


def prefill(
    runner: Runner,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    pages: Sequence[list[int]],
    slots: Sequence[int],
    sampling: SamplingState,
    *,
    k: int,
    chunk: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[Batch, RoundResult]:
    """Prefill prompts of one length together.

    Args:
        prompts: [batch] of at least one token id each, all equally long.
        pages, slots: a prompt each, from `Cache.take`.
        sampling: of these requests.
        k: draft tokens to leave ready.
        chunk: rows a forward and prompt.
        progress: called with the positions done, over all prompts, after each chunk.
    Returns:
        (a batch ready for its first round; the first tokens as a result without drafts).
    """
    device = cache.device
    ids = torch.tensor(prompts, dtype=torch.int64, device=device)
    size, total = ids.shape
    table = torch.tensor(pages, dtype=torch.int64, device=device)
    slot = torch.tensor(slots, dtype=torch.int64, device=device)
    ones = torch.ones(size, dtype=torch.int64, device=device)
    post = pre = ids
    for start in range(0, total, chunk):
        stop = min(start + chunk, total)
        positions = torch.arange(start, stop, device=device).expand(size, -1)
        where = Rows(cache, table, positions, stop, slot, ones, prefill=True)
        post, pre = runner.target_rows(ids[:, start:stop], where)
        if k and stop < total:
            runner.head_rows(ids[:, start + 1 : stop + 1], runner.target.head_hidden(post, pre), where)
        if progress is not None:
            progress(stop * size)
    logits = runner.logits(post[:, -1:])
    token = _first_token(logits, sampling, ones * total)
    sampling.commit(token, ones)
    batch = Batch(
        lengths=ones * total,
        bonus=token[:, 0],
        drafts=token.new_empty((size, 0)),
        draft_probs=None,
        committed=ones,
        table=table,
        slots=slot,
        sampling=sampling,
        bound=total,
    )
    if k:
        following = torch.cat((ids[:, start + 1 :], token), 1)
        out, recycled = runner.head_rows(following, runner.target.head_hidden(post, pre), where)
        batch.drafts, batch.draft_probs = draft_tokens(
            runner, cache, batch, out[:, -1:], recycled[:, -1:], k, bound=total + k
        )
    return batch, RoundResult(token, ones * 0, token.new_empty((size, 0)), logits, logits.amax((-1, -2)).isnan())


def _first_token(logits: Tensor, sampling: SamplingState, position: Tensor) -> Tensor:
    """The token after each prompt, [batch, 1], as plain decoding chooses it."""
    if sampling.plan.all_greedy:
        return adjust(logits, sampling).argmax(-1)
    return sample(process(logits, sampling), uniforms(sampling.seed, position)[:, None, DRAW])
