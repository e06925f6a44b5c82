"""Triton kernels of ``engine.logits.process``: temperature, top-k, top-p and min-p without a sort.

A logit's distance below its row's largest, over the temperature, is a float >= 0 whose bits order as an integer: its
*key*. The k-th largest logit, and the last one that top-p keeps, are found as keys, four bits a pass from the top:
each pass adds up, for the 16 values of the next four bits, how many logits (or how much mass) they hold, and the
next pass picks the value in which the goal is reached. Eight passes end at one key, exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.tokens_triton import BLOCK, best_blocks, best_of_blocks

PASSES = 8
LANES = 512


@triton.jit
def _keys(
    logits: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """(keys as int64, weights exp(-distance)); what lies past the row's end has weight 0."""
    value = tl.load(logits + row * row_stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
    distance = tl.abs(tl.div_rn(best - value, temperature))
    return distance.to(tl.int32, bitcast=True).to(tl.int64), tl.exp(-distance)


@triton.jit
def _resolve(
    part: tl.tensor,
    state: tl.tensor,
    limit: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    number: tl.tensor,
    MASS: tl.constexpr,
    PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(lowest key of the value chosen in pass `number`, what lies below it, goal).

    limit is k, or the share of top-p: the first pass finds the mass that it is a share of.
    """
    n = tl.arange(0, PADDED)
    j = tl.arange(0, 16)
    at = ((number * rows + row) * blocks + n[:, None]) * 16 + j[None, :]
    held = tl.sum(tl.load(part + at, mask=n[:, None] < blocks, other=0.0).to(tl.float64), 0)
    line = state + (number * rows + row) * 4
    known = number > 0
    base = tl.load(line, mask=known, other=0.0)
    before = tl.load(line + 1, mask=known, other=0.0)
    goal = tl.load(line + 2, mask=known, other=0.0)
    first_goal = limit * tl.sum(held) if MASS else limit
    goal = tl.where(known, goal, first_goal)
    reached = before + tl.cumsum(held, 0)
    chosen = tl.minimum(tl.sum((reached < goal).to(tl.int32)), 15)
    before += tl.sum(tl.where(j < chosen, held, 0.0))
    return base + (chosen.to(tl.int64) << (28 - 4 * number)).to(tl.float64), before, goal


@triton.jit(do_not_specialize=["number"])
def _search(
    logits: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    temperature: tl.tensor,
    limits: tl.tensor,
    floors: tl.tensor,
    part: tl.tensor,
    state: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    rows: tl.tensor,
    per_sequence: tl.tensor,
    number: tl.tensor,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    FIRST: tl.constexpr,
    MASS: tl.constexpr,
    FLOOR: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Pass `number`: how much of a block each value of the next four bits holds, among keys up to the row's floor.

    state [passes, rows, 4]: lowest key of the values still in question, what lies below it, goal, largest logit.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    sequence = row // per_sequence
    warm = tl.load(temperature + sequence).to(tl.float32)
    if FIRST:
        best, _ = best_of_blocks(values, ids, row, blocks, PADDED)
        start = tl.full((), 0, tl.int64)
        if tl.program_id(0) == 0:
            tl.store(state + row * 4 + 3, best.to(tl.float64))
    else:
        limit = tl.load(limits + sequence).to(tl.float64)
        best = tl.load(state + ((number - 1) * rows + row) * 4 + 3).to(tl.float32)
        base, before, goal = _resolve(part, state, limit, row, rows, blocks, number - 1, MASS, PADDED)
        start = base.to(tl.int64)
        line = state + (number * rows + row) * 4
        if tl.program_id(0) == 0:
            tl.store(line, base)
            tl.store(line + 1, before)
            tl.store(line + 2, goal)
            tl.store(line + 3, best.to(tl.float64))
    j = tl.arange(0, 16)
    held = tl.zeros((LANES, 16), tl.float32)
    for chunk in range(0, BLOCK, LANES):
        at = tl.program_id(0) * BLOCK + chunk + tl.arange(0, LANES)
        key, weight = _keys(logits, best, warm, row, at, row_stride, width)
        if MASS:
            if FLOOR:
                weight = tl.where(key <= tl.load(floors + row), weight, 0.0)
        else:
            weight = tl.where(at < width, 1.0, 0.0)
        value = (key - start) >> (28 - 4 * number)
        held += tl.where(value[:, None] == j[None, :], weight[:, None], 0.0)
    tl.store(part + ((number * rows + row) * blocks + tl.program_id(0)) * 16 + j, tl.sum(held, 0))


@triton.jit
def _cut(
    limits: tl.tensor,
    part: tl.tensor,
    state: tl.tensor,
    floors: tl.tensor,
    cuts: tl.tensor,
    ties: tl.tensor,
    blocks: tl.tensor,
    rows: tl.tensor,
    per_sequence: tl.tensor,
    last: tl.tensor,
    MASS: tl.constexpr,
    FLOOR: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The largest key to keep, and how many of the ids that have it: all of them for top-k."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits + row // per_sequence).to(tl.float64)
    base, before, goal = _resolve(part, state, limit, row, rows, blocks, last, MASS, PADDED)
    key = base.to(tl.int64)
    everything = tl.full((), 2147483647, tl.int64)
    if MASS:
        weight = tl.exp(-(key.to(tl.int32).to(tl.float32, bitcast=True))).to(tl.float64)
        share = tl.minimum((goal - before) / tl.maximum(weight, 1e-40), 1e9)
        allowed = tl.ceil(tl.maximum(share, 1.0)).to(tl.int32)
        off = limit >= 1
        if FLOOR:
            everything = tl.load(floors + row)
        tl.store(cuts + row, tl.where(off, everything, key))
        tl.store(ties + row, tl.where(off, 2147483647, allowed))
    else:
        tl.store(cuts + row, tl.where(limit > 0, key, everything))
        tl.store(ties + row, 2147483647)


@triton.jit
def _keep(key: tl.tensor, weight: tl.tensor, cut: tl.tensor, least: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(weights below the cut, 0 elsewhere; whether a key is at the cut): of what min-p leaves."""
    enough = weight >= least
    return tl.where((key < cut) & enough, weight, 0.0), (key == cut) & enough


@triton.jit
def _kept_sums(
    logits: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    cuts: tl.tensor,
    sums: tl.tensor,
    tied: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    per_sequence: tl.tensor,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    sequence = row // per_sequence
    best, _ = best_of_blocks(values, ids, row, blocks, PADDED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    warm = tl.load(temperature + sequence).to(tl.float32)
    key, weight = _keys(logits, best, warm, row, at, row_stride, width)
    cut = tl.load(cuts + row) if CUT else tl.full((), 2147483647, tl.int64)
    below, level = _keep(key, weight, cut, tl.load(min_p + sequence).to(tl.float32))
    to = row * blocks + tl.program_id(0)
    tl.store(sums + to, tl.sum(below.to(tl.float64)))
    tl.store(tied + to, tl.sum((level & (at < width)).to(tl.int32)))


@triton.jit
def _probs(
    logits: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    greedy: tl.tensor,
    cuts: tl.tensor,
    ties: tl.tensor,
    sums: tl.tensor,
    tied: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    per_sequence: tl.tensor,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    sequence = row // per_sequence
    best, token = best_of_blocks(values, ids, row, blocks, PADDED)
    at = block * BLOCK + tl.arange(0, BLOCK)
    warm = tl.load(temperature + sequence).to(tl.float32)
    key, weight = _keys(logits, best, warm, row, at, row_stride, width)
    cut = tl.load(cuts + row) if CUT else tl.full((), 2147483647, tl.int64)
    allowed = tl.load(ties + row) if CUT else tl.full((), 2147483647, tl.int32)
    below, level = _keep(key, weight, cut, tl.load(min_p + sequence).to(tl.float32))
    n = tl.arange(0, PADDED)
    total = tl.sum(tl.load(sums + row * blocks + n, mask=n < blocks, other=0.0))
    count = tl.load(tied + row * blocks + n, mask=n < blocks, other=0)
    if CUT:
        tied_weight = tl.exp(-(cut.to(tl.int32).to(tl.float32, bitcast=True))).to(tl.float64)
        kept_ties = tl.minimum(tl.sum(count), allowed)
        total += tl.where(kept_ties > 0, kept_ties.to(tl.float64) * tied_weight, 0.0)
    rank = tl.sum(tl.where(n < block, count, 0)) + tl.cumsum(level.to(tl.int32), 0)
    kept = below + tl.where(level & (rank <= allowed), weight, 0.0)
    prob = tl.div_rn(kept, total.to(tl.float32))
    chosen = tl.where(at == token, 1.0, 0.0)
    tl.store(out + row * width + at, tl.where(tl.load(greedy + sequence) != 0, chosen, prob), mask=at < width)


def process(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor,
    greedy: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """Probabilities to sample from; the definition is ``engine.logits.process`` after its adjustments.

    Args:
        logits: [B, T, V] or [B * T, V] with T rows a sequence in order, contiguous along V.
        temperature, min_p: [B] float64; greedy: [B] bool.
        top_k: [B] int64, 0 is off; None where no request uses it. top_p: [B] float64, 1 is off; None likewise.
    Returns:
        float32, of the logits' shape.
    """
    flat = logits.view(-1, logits.shape[-1])
    rows, width = flat.shape
    per_sequence = rows // temperature.shape[0]
    device = logits.device
    values, ids = best_blocks(flat, pdl=pdl)
    blocks = values.shape[1]
    padded = triton.next_power_of_2(blocks)
    cuts = torch.empty(2, rows, dtype=torch.int64, device=device)
    ties = torch.empty(rows, dtype=torch.int32, device=device)
    searches = [(limits, mass) for limits, mass in ((top_k, False), (top_p, True)) if limits is not None]
    for i, (limits, mass) in enumerate(searches):
        part = torch.empty(PASSES, rows, blocks, 16, dtype=torch.float32, device=device)
        state = torch.empty(PASSES, rows, 4, dtype=torch.float64, device=device)
        options = {"MASS": mass, "FLOOR": i > 0, "PADDED": padded, "PDL": pdl, "num_warps": 8, "launch_pdl": pdl}
        for number in range(PASSES):
            _search[(blocks, rows)](
                flat,
                values,
                ids,
                temperature,
                limits,
                cuts[0],
                part,
                state,
                flat.stride(0),
                width,
                blocks,
                rows,
                per_sequence,
                number,
                BLOCK=BLOCK,
                LANES=LANES,
                FIRST=number == 0,
                **options,
            )
        _cut[(rows,)](limits, part, state, cuts[0], cuts[i], ties, blocks, rows, per_sequence, PASSES - 1, **options)
    cut = cuts[len(searches) - 1] if searches else cuts
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=device)
    tied = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    out = torch.empty(rows, width, dtype=torch.float32, device=device)
    common = {"BLOCK": BLOCK, "CUT": bool(searches), "PADDED": padded, "PDL": pdl, "num_warps": 4, "launch_pdl": pdl}
    grid = (blocks, rows)
    _kept_sums[grid](
        flat, values, ids, temperature, min_p, cut, sums, tied, flat.stride(0), width, blocks, per_sequence, **common
    )
    _probs[grid](
        flat,
        values,
        ids,
        temperature,
        min_p,
        greedy,
        cut,
        ties,
        sums,
        tied,
        out,
        flat.stride(0),
        width,
        blocks,
        per_sequence,
        **common,
    )
    return out.view(logits.shape)
