"""Triton kernel that finds what a small top-k, then top-p and min-p keep of a row; for `probs_triton`.

Keys are those of `cuts_triton`: unequal logits can have the same one. A key that the smallest keys of k groups of ids
do not exceed is not below the row's k-th smallest, and few ids are within it: those are gathered, sorted and cut, one
program a row. Where more than SLOTS are, as with many equal logits, their keys are halved instead, which takes longer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.tokens_triton import GROUP

SLOTS = 128
LARGEST = tl.constexpr(2139095039)
"""Key of the largest finite distance; the ids behind it have no weight."""
TILE = 2048
"""Logits, or gathered ids, looked at together."""


@triton.jit
def is_small(top_k: tl.tensor, SMALL_K: tl.constexpr) -> tl.tensor:
    """Whether a row is one of this kernel's, by its k."""
    return (top_k > 0) & (top_k <= SMALL_K)


@triton.jit
def _keys(
    logits: tl.tensor, ids: tl.tensor, inside: tl.tensor, best: tl.tensor, temperature: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """(keys as of `cuts_triton.row_keys`, weights in float64, 0 outside)."""
    value = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    distance = tl.abs(tl.div_rn(best - value, temperature))
    weight = tl.where(inside, tl.exp(-distance), 0.0).to(tl.float64)
    return distance.to(tl.int32, bitcast=True), weight


@triton.jit
def _below(
    logits: tl.tensor,
    taken: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    bound: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(number, mass) of gathered ids whose keys are below a bound."""
    number = count * 0
    mass = tl.zeros((), tl.float64)
    for start in range(0, count, TILE):
        n = start + tl.arange(0, TILE)
        ids = tl.load(taken + n, mask=n < count, other=0)
        key, weight = _keys(logits, ids, n < count, best, temperature)
        under = (key < bound) & (n < count)
        number += tl.sum(under.to(tl.int32))
        mass += tl.sum(tl.where(under, weight, 0.0))
    return number, mass


@triton.jit
def _reach(
    logits: tl.tensor,
    taken: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    goal: tl.tensor,
    MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The smallest key up to which the gathered ids' number, or mass, reaches a goal; 2^31 - 2 where it does not."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), 2147483646, tl.int32)
    while high - 1 > low:
        middle = low + (high - low) // 2
        number, mass = _below(logits, taken, count, best, temperature, middle + 1, TILE)
        reached = mass >= goal if MASS else number >= goal
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
    return high


@triton.jit
def _sorted(
    logits: tl.tensor,
    taken: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    k: tl.tensor,
    share: tl.tensor,
    least: tl.tensor,
    SLOTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(where the ids kept end, their mass) as of `keep_few`, of at most SLOTS gathered ids."""
    s = tl.arange(0, SLOTS)
    inside = s < count
    ids = tl.load(taken + s, mask=inside, other=0)
    key, _ = _keys(logits, ids, inside, best, temperature)
    places = tl.sort(tl.where(inside, (key.to(tl.int64) << 32) | ids.to(tl.int64), 9223372036854775807))
    key = (places >> 32).to(tl.int32)
    near = tl.exp(-key.to(tl.float32, bitcast=True))
    edge = tl.sum(tl.where(s == tl.minimum(k, count) - 1, key, 0))
    weight = tl.where((key <= edge) & inside, near, 0.0).to(tl.float64)
    before = tl.cumsum(weight, 0) - weight
    goal = tl.where(share < 1, share * tl.sum(weight), float("inf"))
    kept = (key <= edge) & inside & ((before < goal) | (s == 0)) & (near >= least)
    return tl.max(tl.where(kept, places, -1)), tl.sum(tl.where(kept, weight, 0.0))


@triton.jit
def _halved(
    logits: tl.tensor,
    taken: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    k: tl.tensor,
    share: tl.tensor,
    least: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """As `_sorted`, of any number; the end may lie behind it, at an id that min-p refuses."""
    cut = _reach(logits, taken, count, best, temperature, k, False, TILE)
    allowed = count
    if share < 1:
        _, whole = _below(logits, taken, count, best, temperature, cut + 1, TILE)
        cut = tl.minimum(_reach(logits, taken, count, best, temperature, share * whole, True, TILE), cut)
        _, before = _below(logits, taken, count, best, temperature, cut, TILE)
        equal = tl.exp(-cut.to(tl.float32, bitcast=True)).to(tl.float64)
        ratio = tl.minimum((share * whole - before) / tl.maximum(equal, 1e-40), 1e9)
        allowed = tl.ceil(tl.maximum(ratio, 1.0)).to(tl.int32)
    # Gathered ids ascend, so that those at the cut are counted off in order.
    total = tl.zeros((), tl.float64)
    end = count * 0
    passed = count * 0
    for start in range(0, count, TILE):
        n = start + tl.arange(0, TILE)
        ids = tl.load(taken + n, mask=n < count, other=0)
        key, weight = _keys(logits, ids, n < count, best, temperature)
        level = (key == cut) & (n < count)
        level = level & (passed + tl.cumsum(level.to(tl.int32), 0) <= allowed)
        kept = (((key < cut) & (n < count)) | level) & (weight >= least.to(tl.float64))
        total += tl.sum(tl.where(kept, weight, 0.0))
        end = tl.maximum(end, tl.max(tl.where(level, ids, 0)))
        passed += tl.sum(level.to(tl.int32))
    return (cut.to(tl.int64) << 32) | end.to(tl.int64), total


@triton.jit
def _keep_few(
    logits: tl.tensor,
    tops: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    chosen: tl.tensor,
    taken: tl.tensor,
    last: tl.tensor,
    totals: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    groups: tl.tensor,
    per_sequence: tl.tensor,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    SMALL_K: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    sequence = row // per_sequence
    k = tl.load(top_k + sequence).to(tl.int32)
    if is_small(k, SMALL_K):
        warm = tl.load(temperature + sequence).to(tl.float32)
        share = tl.load(top_p + sequence)
        least = tl.load(min_p + sequence).to(tl.float32)
        logits += row * row_stride
        chosen += row * groups
        taken += row * width

        g = tl.arange(0, PADDED)
        top = tl.load(tops + row * groups + g, mask=g < groups, other=float("-inf"))
        best = tl.max(top)
        near = tl.abs(tl.div_rn(best - top, warm)).to(tl.int32, bitcast=True)
        near = tl.where(g < groups, near, 2147483647)
        # A bound that as few groups as possible are within, but k at least; where there are not so many, LARGEST.
        below = tl.full((), -1, tl.int32)
        bound = tl.full((), LARGEST, tl.int32)
        number = tl.maximum(tl.sum((near <= bound).to(tl.int32)), k)
        while (bound - below > 1) & (number != k):
            middle = below + (bound - below) // 2
            within = tl.sum((near <= middle).to(tl.int32))
            number = tl.where(within >= k, within, number)
            bound = tl.where(within >= k, middle, bound)
            below = tl.where(within >= k, below, middle)

        inside = near <= bound
        place = tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(chosen + place, g, mask=inside)
        many = tl.sum(inside.to(tl.int32))
        tl.debug_barrier()
        count = many * 0
        t = tl.arange(0, TILE)
        for start in range(0, many, TILE // GROUP):
            at = start + t // GROUP
            ids = tl.load(chosen + at, mask=at < many, other=0) * GROUP + t % GROUP
            there = (at < many) & (ids < width)
            key, _ = _keys(logits, ids, there, best, warm)
            there = there & (key <= bound)
            rank = tl.cumsum(there.to(tl.int32), 0)
            tl.store(taken + count + rank - 1, ids, mask=there)
            count += tl.sum(there.to(tl.int32))
        tl.debug_barrier()

        if count <= SLOTS:
            end, mass = _sorted(logits, taken, count, best, warm, k, share, least, SLOTS)
        else:
            end, mass = _halved(logits, taken, count, best, warm, k, share, least, TILE)
        tl.store(last + row, end)
        tl.store(totals + row, mass)


def keep_few(
    logits: Tensor,
    tops: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    taken: Tensor,
    *,
    small_k: int,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """What remains of each row with a k from 1 to `small_k`; the other rows' results mean nothing.

    Args:
        logits: [rows, V], contiguous along V; tops: [rows, groups] float32, the largest of each GROUP ids.
        temperature, top_p, min_p: [B] float64, of rows / B rows each; top_k: [B] int64.
        taken: [rows, V] int32, work space.
    Returns:
        (last [rows] int64, a key times 2^32 plus an id, at which the ids kept end in order of key and then id; the mass
        of the ids kept [rows] float64). Kept are those up to the last whose weight min-p admits. A row without a
        finite largest logit keeps none.
    """
    rows, width = logits.shape
    groups, device = tops.shape[1], logits.device
    chosen = torch.empty(rows, groups, dtype=torch.int32, device=device)
    last = torch.empty(rows, dtype=torch.int64, device=device)
    totals = torch.empty(rows, dtype=torch.float64, device=device)
    _keep_few[(rows,)](
        logits,
        tops,
        temperature,
        top_k,
        top_p,
        min_p,
        chosen,
        taken,
        last,
        totals,
        logits.stride(0),
        width,
        groups,
        rows // temperature.shape[0],
        GROUP=GROUP,
        TILE=TILE,
        SLOTS=SLOTS,
        SMALL_K=small_k,
        PADDED=triton.next_power_of_2(groups),
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return last, totals
