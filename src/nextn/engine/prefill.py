"""Prefill: run prompts through target and head in chunks, and take the first tokens and their drafts.

The head's row at position t needs token t + 1: the last row of a chunk that is not the last takes the next prompt
token; the prompt's last row takes the token that the target just gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.contexts import Rows
from nextn.engine.round import RoundResult, draft
from nextn.engine.runner import Runner
from nextn.engine.sampling import DRAW, SamplingState, adjust, broken_logits, process, sample, settle, uniforms


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sequence: `rows` of its `tokens` from position `start` on, with its pages and slot."""

    tokens: Sequence[int]
    start: int
    rows: int
    pages: Sequence[int]
    slot: int


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
    """Prefill whole prompts of one length together.

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
    total = len(prompts[0])
    for start in range(0, total, chunk):
        rows = min(chunk, total - start)
        pieces = [Piece(t, start, rows, p, s) for t, p, s in zip(prompts, pages, slots, strict=True)]
        if start + rows < total:
            prefill_rows(runner, cache, pieces, head=k > 0)
        else:
            batch, first = prefill_end(runner, cache, pieces, sampling, head=k > 0)
        if progress is not None:
            progress((start + rows) * len(prompts))
    if k:
        draft(runner, cache, batch, k)
    return batch, first


def prefill_rows(runner: Runner, cache: Cache, pieces: Sequence[Piece], *, head: bool) -> None:
    """Put rows of tokens into the caches; each piece has the same number of rows and ends before its tokens do.

    Args:
        head: fill the draft cache too.
    """
    where, ids = _place(cache, pieces)
    post, pre = runner.target_rows(ids, where)
    if head:
        following = torch.tensor([_tokens(p, 1) for p in pieces], device=cache.device)
        runner.head_rows(following, runner.target.head_hidden(post, pre), where)


def prefill_end(
    runner: Runner,
    cache: Cache,
    pieces: Sequence[Piece],
    sampling: SamplingState,
    *,
    head: bool,
    known: Sequence[int] | None = None,
) -> tuple[Batch, RoundResult]:
    """The last rows of sequences, and the token that follows each.

    Args:
        pieces: of the same number of rows, each ending with its tokens.
        sampling: of these requests; the tokens chosen here are counted in it.
        head: fill the draft cache too, and carry the head states that drafting starts from.
        known: the tokens that follow, of sequences computed again; they are counted already.
    Returns:
        (a batch without draft tokens; the first tokens as a result, without meaning where they were known).
    """
    where, ids = _place(cache, pieces)
    post, pre = runner.target_rows(ids, where)
    logits = runner.logits(post[:, -1:])
    lengths = where.positions[:, -1] + 1
    if known is None:
        token = _first_token(logits, sampling, lengths)
        sampling.commit(token, torch.ones_like(lengths))
    else:
        token = torch.tensor(known, device=cache.device)[:, None]
    batch = Batch(
        lengths=lengths,
        bonus=token[:, 0],
        drafts=token.new_empty((len(pieces), 0)),
        draft_probs=None,
        committed=where.committed,
        table=where.table,
        slots=where.slots,
        sampling=sampling,
        bound=where.bound,
    )
    if head:
        following = torch.cat((ids[:, 1:], token), 1)
        out, recycled = runner.head_rows(following, runner.target.head_hidden(post, pre), where)
        batch.head_out, batch.head_hidden = out[:, -1:], recycled[:, -1:]
    nothing, broken = torch.zeros_like(lengths), broken_logits(logits)
    outcome = settle(lengths, token, nothing, batch.drafts, broken).outcome
    return batch, RoundResult(token, nothing, batch.drafts, logits, broken, outcome)


def page_table(pages: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Page ids [batch, n]; a shorter row goes on with its own first page, which nobody else's numbers can reach."""
    width = max(len(p) for p in pages)
    return torch.tensor([[*p, *[p[0]] * (width - len(p))] for p in pages], device=device)


def _place(cache: Cache, pieces: Sequence[Piece]) -> tuple[Rows, Tensor]:
    """Where the pieces' rows stand, and their ids [batch, rows]."""
    device = cache.device
    ids = torch.tensor([_tokens(p) for p in pieces], device=device)
    starts = [p.start for p in pieces]
    start = torch.tensor(starts, device=device)
    slots = torch.tensor([p.slot for p in pieces], device=device)
    positions = start[:, None] + torch.arange(ids.shape[1], device=device)
    bound = max(p.start + p.rows for p in pieces)
    table = page_table([p.pages for p in pieces], device)
    return Rows(cache, table, positions, bound, slots, torch.zeros_like(slots), starts=starts), ids


def _tokens(piece: Piece, ahead: int = 0) -> list[int]:
    begin = piece.start + ahead
    return list(piece.tokens[begin : begin + piece.rows])


def _first_token(logits: Tensor, sampling: SamplingState, position: Tensor) -> Tensor:
    """The token after each prompt, [batch, 1], as plain decoding chooses it."""
    if sampling.plan.all_greedy:
        return adjust(logits, sampling).argmax(-1)
    return sample(process(logits, sampling), uniforms(sampling.seed, position)[:, None, DRAW])
