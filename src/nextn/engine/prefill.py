"""Prefill: run a prompt through target and head in chunks, and take the first token and its drafts.

The head's row at position t needs token t + 1: the last row of a chunk that is not the last takes the next prompt
token; the prompt's last row takes the token that the target just gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.contexts import DraftContext, Rows, TargetContext
from nextn.engine.round import RoundResult, draft_tokens
from nextn.engine.sampling import DRAW, SamplingState, adjust, process, sample, uniforms
from nextn.models.decoder import Decoder, Drafter


def prefill(
    target: Decoder,
    draft: Drafter,
    cache: Cache,
    prompt: Sequence[int],
    pages: list[int],
    slot: int,
    sampling: SamplingState,
    *,
    k: int,
    chunk: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Batch, RoundResult]:
    """Prefill one prompt.

    Args:
        prompt: at least one token id.
        pages, slot: from `Cache.take`.
        sampling: of this one request.
        k: draft tokens to leave ready.
        chunk: rows a forward.
        progress: called with (positions done, positions in all) after each chunk.
    Returns:
        (a batch of one, ready for its first round; the first token as a result without drafts).
    """
    device = cache.device
    ids = torch.tensor(prompt, dtype=torch.int64, device=device)[None]
    total = len(prompt)
    table = torch.tensor([pages], dtype=torch.int64, device=device)
    slots = torch.tensor([slot], dtype=torch.int64, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    post = pre = ids
    for start in range(0, total, chunk):
        stop = min(start + chunk, total)
        where = Rows(cache, table, torch.arange(start, stop, device=device)[None], stop, slots, one, prefill=True)
        post, pre = target(ids[:, start:stop], TargetContext(where))
        if k and stop < total:
            draft.head_forward(ids[:, start + 1 : stop + 1], target.head_hidden(post, pre), DraftContext(where))
        if progress is not None:
            progress(stop, total)
    logits = target.logits(post[:, -1:])
    token = _first_token(logits, sampling, one * total)
    sampling.commit(token, one)
    batch = Batch(
        lengths=one * total,
        bonus=token[:, 0],
        drafts=token.new_empty((1, 0)),
        draft_probs=None,
        committed=one,
        table=table,
        slots=slots,
        sampling=sampling,
        bound=total,
    )
    if k:
        following = torch.cat((ids[:, start + 1 :], token), 1)
        out, recycled = draft.head_forward(following, target.head_hidden(post, pre), DraftContext(where))
        batch.drafts, batch.draft_probs = draft_tokens(
            draft, cache, batch, out[:, -1:], recycled[:, -1:], k, bound=total + k
        )
    return batch, RoundResult(token, one * 0, token.new_empty((1, 0)), logits, logits.amax((-1, -2)).isnan())


def _first_token(logits: Tensor, sampling: SamplingState, position: Tensor) -> Tensor:
    """The token after the prompt, [1, 1], as plain decoding chooses it."""
    if sampling.plan.all_greedy:
        return adjust(logits, sampling).argmax(-1)
    return sample(process(logits, sampling), uniforms(sampling.seed, position)[:, None, DRAW])
