"""Triton kernels of ``engine.sampling``: from logits or probabilities to tokens, on the device.

A row of V numbers is handled in blocks by many programs, then one program a row finishes. Sums that decide a token
run in float64 and in a fixed order, so that equal inputs give equal tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 2048


@triton.jit
def block_best(
    logits: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A block's largest logit and its lowest id; a NaN counts as the largest, and its id is stored as -1 - id."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    value = tl.load(logits + row * row_stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
    broken = value != value
    value = tl.where(broken, float("inf"), value)
    best = tl.max(value)
    wrong = tl.max(broken.to(tl.int32)) > 0
    hit = tl.where(wrong, broken, value == best) & (at < width)
    first = tl.min(tl.where(hit, at, 2147483647))
    tl.store(values + row * blocks + tl.program_id(0), best)
    tl.store(ids + row * blocks + tl.program_id(0), tl.where(wrong, -1 - first, first))


@triton.jit
def best_of_blocks(
    values: tl.tensor, ids: tl.tensor, row: tl.tensor, blocks: tl.tensor, PADDED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """A row's largest value and its id, -1 - id for a NaN, from what `block_best` left."""
    n = tl.arange(0, PADDED)
    value = tl.load(values + row * blocks + n, mask=n < blocks, other=float("-inf"))
    token = tl.load(ids + row * blocks + n, mask=n < blocks, other=2147483647)
    best = tl.max(value)
    wrong = tl.min(token) < 0
    at = tl.where(token < 0, -1 - token, token)
    first = tl.min(tl.where(tl.where(wrong, token < 0, value == best) & (n < blocks), at, 2147483647))
    return best, tl.where(wrong, -1 - first, first)


@triton.jit
def _argmax(
    values: tl.tensor,
    ids: tl.tensor,
    tokens: tl.tensor,
    valid: tl.tensor,
    blocks: tl.tensor,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    _, token = best_of_blocks(values, ids, row, blocks, PADDED)
    tl.store(tokens + row, tl.where(token < 0, -1 - token, token).to(tl.int64))
    tl.store(valid + row, token >= 0)


@triton.jit
def _accept_best(
    values: tl.tensor,
    ids: tl.tensor,
    drafts: tl.tensor,
    tokens: tl.tensor,
    accepted: tl.tensor,
    broken: tl.tensor,
    draft_row: tl.tensor,
    blocks: tl.tensor,
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    batch = tl.program_id(0)
    kept = batch * 0
    going = batch >= 0
    wrong = batch < 0
    for i in tl.static_range(STEPS + 1):
        at = batch * (STEPS + 1) + i
        best, token = best_of_blocks(values, ids, at, blocks, PADDED)
        wrong = wrong | (token < 0) | (tl.abs(best) == float("inf"))
        token = tl.where(token < 0, -1 - token, token).to(tl.int64)
        tl.store(tokens + at, token)
        if i < STEPS:
            going = going & (token == tl.load(drafts + batch * draft_row + i))
            kept += going.to(tl.int32)
    tl.store(accepted + batch, kept.to(tl.int64))
    tl.store(broken + batch, wrong)


@triton.jit
def _block_sums(
    probs: tl.tensor,
    sums: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    value = tl.load(probs + row * width + at, mask=at < width, other=0.0).to(tl.float64)
    tl.store(sums + row * blocks + tl.program_id(0), tl.sum(value))


@triton.jit
def _find_block(
    sums: tl.tensor, draw: tl.tensor, blocks: tl.tensor, PADDED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(block whose cumulative sum first exceeds draw * total, the sum before it, draw * total)."""
    n = tl.arange(0, PADDED)
    mass = tl.load(sums + n, mask=n < blocks, other=0.0)
    reached = tl.cumsum(mass, 0)
    goal = draw * tl.sum(tl.where(n == blocks - 1, reached, 0.0))
    # The last block with any mass stands in where rounding leaves none above the goal.
    last = tl.max(tl.where(mass > 0, n, 0))
    block = tl.minimum(tl.sum((reached <= goal).to(tl.int32)), last)
    return block, tl.sum(tl.where(n == block, reached - mass, 0.0)), goal


@triton.jit
def _find_id(value: tl.tensor, at: tl.tensor, before: tl.tensor, goal: tl.tensor) -> tl.tensor:
    """The first id of a block at which the cumulative sum exceeds the goal; never one without mass."""
    reached = before + tl.cumsum(value, 0)
    first = tl.min(tl.where((reached > goal) & (value > 0), at, 2147483647))
    return tl.minimum(first, tl.max(tl.where(value > 0, at, 0)))


@triton.jit
def _sample(
    probs: tl.tensor,
    sums: tl.tensor,
    draws: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    draw_stride: tl.tensor,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block, before, goal = _find_block(sums + row * blocks, tl.load(draws + row * draw_stride), blocks, PADDED)
    at = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(probs + row * width + at, mask=at < width, other=0.0).to(tl.float64)
    tl.store(tokens + row, _find_id(value, at, before, goal).to(tl.int64))


@triton.jit
def _kept(
    target: tl.tensor,
    draft: tl.tensor,
    drafts: tl.tensor,
    tests: tl.tensor,
    batch: tl.tensor,
    width: tl.tensor,
    test_stride: tl.tensor,
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:
    """How many draft tokens of a sequence pass their tests before the first that does not."""
    i = tl.arange(0, PADDED)
    token = tl.load(drafts + batch * STEPS + i, mask=i < STEPS, other=0)
    p = tl.load(target + (batch * (STEPS + 1) + i) * width + token, mask=i < STEPS, other=0.0).to(tl.float64)
    q = tl.load(draft + (batch * STEPS + i) * width + token, mask=i < STEPS, other=1.0).to(tl.float64)
    test = tl.load(tests + (batch * (STEPS + 1) + i) * test_stride, mask=i < STEPS, other=1.0)
    return tl.min(tl.where(test * q < p, STEPS, i))


@triton.jit
def _residual_sums(
    target: tl.tensor,
    draft: tl.tensor,
    drafts: tl.tensor,
    tests: tl.tensor,
    sums: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    test_stride: tl.tensor,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Block sums of max(p - q, 0) and of p, at the row of the first refused draft token: sums [batch, 2, blocks]."""
    if PDL:
        gdc_launch_dependents()
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    kept = _kept(target, draft, drafts, tests, batch, width, test_stride, STEPS, PADDED)
    p = tl.load(target + (batch * (STEPS + 1) + kept) * width + at, mask=at < width, other=0.0)
    refused = (at < width) & (at * 0 + kept < STEPS)
    q = tl.load(draft + (batch * STEPS + kept) * width + at, mask=refused, other=0.0)
    to = sums + batch * 2 * blocks + tl.program_id(0)
    tl.store(to, tl.sum(tl.maximum(p - q, 0.0).to(tl.float64)))
    tl.store(to + blocks, tl.sum(p.to(tl.float64)))


@triton.jit
def _accept(
    target: tl.tensor,
    draft: tl.tensor,
    drafts: tl.tensor,
    tests: tl.tensor,
    draws: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,
    accepted: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    test_stride: tl.tensor,
    draw_stride: tl.tensor,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    batch = tl.program_id(0).to(tl.int64)
    kept = _kept(target, draft, drafts, tests, batch, width, test_stride, STEPS, PADDED)
    draw = tl.load(draws + (batch * (STEPS + 1) + kept) * draw_stride)
    n = tl.arange(0, PADDED_BLOCKS)
    residual = tl.sum(tl.load(sums + batch * 2 * blocks + n, mask=n < blocks, other=0.0))
    subtract = (kept < STEPS) & (residual > 0)
    own = sums + batch * 2 * blocks + tl.where(subtract, 0, blocks)
    block, before, goal = _find_block(own, draw, blocks, PADDED_BLOCKS)
    at = block * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(target + (batch * (STEPS + 1) + kept) * width + at, mask=at < width, other=0.0)
    limit = tl.where(subtract, width, 0)
    q = tl.load(draft + (batch * STEPS + kept) * width + at, mask=at < limit, other=0.0)
    bonus = _find_id(tl.maximum(p - q, 0.0).to(tl.float64), at, before, goal).to(tl.int64)
    i = tl.arange(0, PADDED)
    token = tl.load(drafts + batch * STEPS + i, mask=i < STEPS, other=0)
    tl.store(tokens + batch * (STEPS + 1) + i, tl.where(i < kept, token, bonus), mask=i <= STEPS)
    tl.store(accepted + batch, kept.to(tl.int64))


def argmax(logits: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """The lowest id of the largest logit of each row.

    Args:
        logits: [rows, V], contiguous along V.
    Returns:
        (ids [rows] int64, valid [rows] bool): valid is False where a row holds a NaN; its id is the first NaN's.
    """
    values, ids = best_blocks(logits, pdl=pdl)
    rows, blocks = values.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    valid = torch.empty(rows, dtype=torch.bool, device=logits.device)
    _argmax[(rows,)](
        values, ids, tokens, valid, blocks, PADDED=triton.next_power_of_2(blocks), PDL=pdl, num_warps=1, launch_pdl=pdl
    )
    return tokens, valid


def best_blocks(logits: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """The largest logit of each block and its id: [rows, blocks] float32 and int32; read by `best_of_blocks`."""
    rows, width = logits.shape
    blocks = triton.cdiv(width, BLOCK)
    values = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    block_best[(blocks, rows)](
        logits, values, ids, logits.stride(0), width, blocks, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return values, ids


def accept_best(logits: Tensor, drafts: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """`argmax`, and `sampling.accept_greedy` of drafts against it.

    Args:
        logits: [B, K + 1, V], contiguous.
        drafts: [B, K] int64, contiguous along K.
    Returns:
        (tokens [B, K + 1] int64, accepted [B] int64, broken [B] bool: a row of the sequence holds a NaN, or its largest
        logit is infinite).
    """
    batch, steps = drafts.shape
    values, ids = best_blocks(logits.view(-1, logits.shape[-1]), pdl=pdl)
    blocks = values.shape[1]
    tokens = torch.empty(batch, steps + 1, dtype=torch.int64, device=drafts.device)
    accepted = torch.empty(batch, dtype=torch.int64, device=drafts.device)
    broken = torch.empty(batch, dtype=torch.bool, device=drafts.device)
    _accept_best[(batch,)](
        values,
        ids,
        drafts,
        tokens,
        accepted,
        broken,
        drafts.stride(0),
        blocks,
        STEPS=steps,
        PADDED=triton.next_power_of_2(blocks),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return tokens, accepted, broken


def sample(probs: Tensor, draws: Tensor, *, pdl: bool = False) -> Tensor:
    """`sampling.sample` for contiguous probs [rows, V] and draws [rows] float64, any stride; returns [rows] int64."""
    rows, width = probs.shape
    blocks = triton.cdiv(width, BLOCK)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=probs.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=probs.device)
    _block_sums[(blocks, rows)](probs, sums, width, blocks, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl)
    _sample[(rows,)](
        probs,
        sums,
        draws,
        tokens,
        width,
        blocks,
        draws.stride(0),
        BLOCK=BLOCK,
        PADDED=triton.next_power_of_2(blocks),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return tokens


def accept(
    target_probs: Tensor, drafts: Tensor, draft_probs: Tensor, tests: Tensor, draws: Tensor, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """`sampling.accept` against the probabilities that the drafts were drawn from.

    Args:
        target_probs: [B, K + 1, V]; draft_probs: [B, K, V]; drafts: [B, K] int64; all contiguous, K of at least 1.
        tests, draws: [B, K + 1] float64 with one stride between neighbours: the numbers that test each draft token,
            and those that draw the new token.
    Returns:
        (tokens [B, K + 1], accepted [B]), int64.
    """
    batch, steps = drafts.shape
    width = target_probs.shape[-1]
    blocks = triton.cdiv(width, BLOCK)
    sums = torch.empty(batch, 2, blocks, dtype=torch.float64, device=drafts.device)
    tokens = torch.empty(batch, steps + 1, dtype=torch.int64, device=drafts.device)
    accepted = torch.empty(batch, dtype=torch.int64, device=drafts.device)
    padded = triton.next_power_of_2(steps + 1)
    _residual_sums[(blocks, batch)](
        target_probs,
        draft_probs,
        drafts,
        tests,
        sums,
        width,
        blocks,
        tests.stride(1),
        BLOCK=BLOCK,
        STEPS=steps,
        PADDED=padded,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    _accept[(batch,)](
        target_probs,
        draft_probs,
        drafts,
        tests,
        draws,
        sums,
        tokens,
        accepted,
        width,
        blocks,
        tests.stride(1),
        draws.stride(1),
        BLOCK=BLOCK,
        STEPS=steps,
        PADDED=padded,
        PADDED_BLOCKS=triton.next_power_of_2(blocks),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return tokens, accepted
