"""Triton kernels that find where top-k and top-p cut, without a sort; for `probs_triton`.

A logit's distance below its row's largest, over the temperature, is a float >= 0 whose bits order as an integer: its
*key*. The k-th largest logit, and the last one that top-p keeps, are found as keys: two passes over the row add up how
many logits (or how much mass) lie below each of 16 bounds, the second between the two bounds of the first that the
goal lies between. What then remains in question is gathered, and one program a row halves it until one key is left.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.tokens_triton import BLOCK, best_of_blocks

LANES = 512
TAKEN = 32
"""Gathered keys of each block that are looked at together."""
DISTANCES = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 48)
"""Upper bounds of the first pass; before them comes the largest logit itself, and after them the rest."""


@cache
def _bounds(device: torch.device) -> Tensor:
    """Keys of the first pass's 16 upper bounds, int32."""
    keys = torch.tensor(DISTANCES, dtype=torch.float32).view(torch.int32).tolist()
    return torch.tensor([1, *keys, 2**31 - 1], dtype=torch.int32, device=device)


@triton.jit
def row_keys(
    logits: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """(keys, weights exp(-distance)); what lies past the row's end has weight 0."""
    value = tl.load(logits + row * row_stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
    distance = tl.abs(tl.div_rn(best - value, temperature))
    return distance.to(tl.int32, bitcast=True), tl.exp(-distance)


@triton.jit
def _between(
    part: tl.tensor,
    uppers: tl.tensor,
    lowest: tl.tensor,
    goal: tl.tensor,
    line: tl.tensor,
    blocks: tl.tensor,
    limit: tl.tensor,
    FIRST: tl.constexpr,
    MASS: tl.constexpr,
    PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(first key in question, first key behind them, what lies below the first, goal), after a pass with these bounds.

    After the first pass the goal is made of limit: k, or the share of the row's mass; 0 where the filter is off.
    """
    n = tl.arange(0, PADDED)
    j = tl.arange(0, 16)
    at = (line * blocks + n[:, None]) * 16 + j[None, :]
    below = tl.sum(tl.load(part + at, mask=n[:, None] < blocks, other=0.0).to(tl.float64), 0)
    if FIRST:
        if MASS:
            goal = tl.where(limit < 1, limit * tl.max(below), 0.0)
        else:
            goal = limit
    chosen = tl.minimum(tl.sum((below < goal).to(tl.int32)), 15)
    high = tl.sum(tl.where(j == chosen, uppers, 0))
    low = tl.where(chosen > 0, tl.sum(tl.where(j == chosen - 1, uppers, 0)), lowest)
    before = tl.sum(tl.where(j == chosen - 1, below, 0.0))
    return low, high, before, goal


@triton.jit
def _finer(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """16 upper bounds that divide the keys from low to high."""
    step = (high - low + 15) // 16
    return tl.minimum(low + step, high) + tl.minimum(tl.arange(0, 16) * step, tl.maximum(high - low - step, 0))


@triton.jit
def _search(
    logits: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    temperature: tl.tensor,
    limits: tl.tensor,
    floors: tl.tensor,
    bounds: tl.tensor,
    part: tl.tensor,
    keys: tl.tensor,
    sums: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    rows: tl.tensor,
    per_sequence: tl.tensor,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    FIRST: tl.constexpr,
    MASS: tl.constexpr,
    FLOOR: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """How much of a block lies below each bound of this pass, among keys up to the row's floor.

    part [2, rows, blocks, 16]; the second pass leaves keys [2, rows, 2] and sums [2, rows, 2] as `_between` gives
    them for the first.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    sequence = row // per_sequence
    warm = tl.load(temperature + sequence).to(tl.float32)
    best, _ = best_of_blocks(values, ids, row, blocks, PADDED)
    uppers = tl.load(bounds + tl.arange(0, 16))
    line = row
    if not FIRST:
        limit = tl.load(limits + sequence).to(tl.float64)
        low, high, before, goal = _between(part, uppers, 0, limit, row, blocks, limit, True, MASS, PADDED)
        if tl.program_id(0) == 0:
            tl.store(keys + row * 2, low)
            tl.store(keys + row * 2 + 1, high)
            tl.store(sums + row * 2, before)
            tl.store(sums + row * 2 + 1, goal)
        uppers = _finer(low, high)
        line += rows
    below = tl.zeros((LANES, 16), tl.float32)
    for chunk in range(0, BLOCK, LANES):
        at = tl.program_id(0) * BLOCK + chunk + tl.arange(0, LANES)
        key, weight = row_keys(logits, best, warm, row, at, row_stride, width)
        if MASS:
            if FLOOR:
                weight = tl.where(key <= tl.load(floors + row), weight, 0.0)
        else:
            weight = tl.where(at < width, 1.0, 0.0)
        below += tl.where(key[:, None] < uppers[None, :], weight[:, None], 0.0)
    tl.store(part + (line * blocks + tl.program_id(0)) * 16 + tl.arange(0, 16), tl.sum(below, 0))


@triton.jit
def _gather(
    logits: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    temperature: tl.tensor,
    floors: tl.tensor,
    part: tl.tensor,
    keys: tl.tensor,
    sums: tl.tensor,
    taken: tl.tensor,
    counts: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    rows: tl.tensor,
    per_sequence: tl.tensor,
    BLOCK: tl.constexpr,
    MASS: tl.constexpr,
    FLOOR: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A block's keys still in question after the second pass, at the front of its part of ``taken`` [rows, width]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    warm = tl.load(temperature + row // per_sequence).to(tl.float32)
    best, _ = best_of_blocks(values, ids, row, blocks, PADDED)
    low, high = tl.load(keys + row * 2), tl.load(keys + row * 2 + 1)
    below, goal = tl.load(sums + row * 2), tl.load(sums + row * 2 + 1)
    line = rows + row
    first, end, before, goal = _between(part, _finer(low, high), low, goal, line, blocks, goal, False, MASS, PADDED)
    before = tl.where(first == low, below, before)
    if block == 0:
        tl.store(keys + line * 2, first)
        tl.store(keys + line * 2 + 1, end)
        tl.store(sums + line * 2, before)
        tl.store(sums + line * 2 + 1, goal)
    at = block * BLOCK + tl.arange(0, BLOCK)
    key, _ = row_keys(logits, best, warm, row, at, row_stride, width)
    inside = (key >= first) & (key < end) & (at < width)
    if FLOOR:
        inside = inside & (key <= tl.load(floors + row))
    place = tl.cumsum(inside.to(tl.int32), 0) - 1
    tl.store(taken + row * width + block * BLOCK + place, key, mask=inside)
    tl.store(counts + row * blocks + block, tl.sum(inside.to(tl.int32)))


@triton.jit
def _taken(
    taken: tl.tensor,
    count: tl.tensor,
    row: tl.tensor,
    width: tl.tensor,
    start: tl.tensor,
    BLOCK: tl.constexpr,
    TAKEN: tl.constexpr,
    MASS: tl.constexpr,
    PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(keys, what each counts for in float64) of TAKEN gathered places of every block; places without one lie last."""
    place = start + tl.arange(0, TAKEN)[None, :]
    at = row * width + tl.arange(0, PADDED)[:, None] * BLOCK + place
    key = tl.load(taken + at, mask=place < count[:, None], other=2147483647)
    if MASS:
        weight = tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)
    else:
        weight = tl.full((PADDED, TAKEN), 1.0, tl.float64)
    return key, weight


@triton.jit
def _cut(
    limits: tl.tensor,
    keys: tl.tensor,
    sums: tl.tensor,
    taken: tl.tensor,
    counts: tl.tensor,
    floors: tl.tensor,
    cuts: tl.tensor,
    ties: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    rows: tl.tensor,
    per_sequence: tl.tensor,
    BLOCK: tl.constexpr,
    TAKEN: tl.constexpr,
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
    line = rows + row
    low, high = tl.load(keys + line * 2), tl.load(keys + line * 2 + 1)
    before, goal = tl.load(sums + line * 2), tl.load(sums + line * 2 + 1)
    n = tl.arange(0, PADDED)
    count = tl.load(counts + row * blocks + n, mask=n < blocks, other=0)
    most = tl.max(count)
    base = before
    front, front_weight = _taken(taken, count, row, width, 0, BLOCK, TAKEN, MASS, PADDED)
    while high - low > 1:
        middle = low + (high - low) // 2
        below = base + tl.sum(tl.where(front < middle, front_weight, 0.0))
        for start in range(TAKEN, most, TAKEN):
            key, weight = _taken(taken, count, row, width, start, BLOCK, TAKEN, MASS, PADDED)
            below += tl.sum(tl.where(key < middle, weight, 0.0))
        reached = below >= goal
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
        before = tl.where(reached, before, below)
    everything = tl.full((), 2147483647, tl.int32)
    if MASS:
        weight = tl.exp(-low.to(tl.float32, bitcast=True)).to(tl.float64)
        share = tl.minimum((goal - before) / tl.maximum(weight, 1e-40), 1e9)
        allowed = tl.ceil(tl.maximum(share, 1.0)).to(tl.int32)
        off = limit >= 1
        if FLOOR:
            everything = tl.load(floors + row)
        tl.store(cuts + row, tl.where(off, everything, low))
        tl.store(ties + row, tl.where(off, 2147483647, allowed))
    else:
        tl.store(cuts + row, tl.where(limit > 0, low, everything))
        tl.store(ties + row, 2147483647)


def find_cut(
    logits: Tensor,
    best: tuple[Tensor, Tensor],
    temperature: Tensor,
    limits: Tensor,
    cut: Tensor,
    ties: Tensor,
    taken: Tensor,
    *,
    mass: bool,
    floors: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write the largest key to keep of each row to cut, and how many of the ids at it to ties.

    Args:
        logits: [rows, V], contiguous along V; best: of `best_blocks`.
        temperature: [B] float64, of rows / B rows each.
        limits: [B], k of top-k, 0 off (int64), or with `mass` the share of top-p, 1 off (float64).
        cut, ties: [rows] int32.
        taken: [rows, V] int32, work space.
        floors: [rows] int32, keys above which nothing is left, from a cut before.
    """
    values, ids = best
    rows, width = logits.shape
    blocks, device = values.shape[1], logits.device
    part = torch.empty(2, rows, blocks, 16, dtype=torch.float32, device=device)
    keys = torch.empty(2, rows, 2, dtype=torch.int32, device=device)
    marks = torch.empty(2, rows, 2, dtype=torch.float64, device=device)
    counts = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    floor = floors if floors is not None else cut
    sizes = (logits.stride(0), width, blocks, rows, rows // temperature.shape[0])
    options = {"MASS": mass, "FLOOR": floors is not None, "PADDED": triton.next_power_of_2(blocks), "PDL": pdl}
    options |= {"BLOCK": BLOCK, "num_warps": 8, "launch_pdl": pdl}
    row = (logits, values, ids, temperature)
    grid = (blocks, rows)
    for first in (True, False):
        _search[grid](
            *row, limits, floor, _bounds(device), part, keys, marks, *sizes, LANES=LANES, FIRST=first, **options
        )
    _gather[grid](*row, floor, part, keys, marks, taken, counts, *sizes, **options)
    _cut[(rows,)](limits, keys, marks, taken, counts, floor, cut, ties, *sizes[1:], TAKEN=TAKEN, **options)
