"""Triton kernels of ``engine.logits.process``: temperature, top-k, top-p and min-p, from logits to probabilities."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nextn.kernels.cuts_triton import find_cut, row_keys
from nextn.kernels.tokens_triton import BLOCK, best_blocks, best_of_blocks


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
    key, weight = row_keys(logits, best, warm, row, at, row_stride, width)
    cut = tl.load(cuts + row) if CUT else tl.full((), 2147483647, tl.int32)
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
    key, weight = row_keys(logits, best, warm, row, at, row_stride, width)
    cut = tl.load(cuts + row) if CUT else tl.full((), 2147483647, tl.int32)
    allowed = tl.load(ties + row) if CUT else tl.full((), 2147483647, tl.int32)
    below, level = _keep(key, weight, cut, tl.load(min_p + sequence).to(tl.float32))
    n = tl.arange(0, PADDED)
    total = tl.sum(tl.load(sums + row * blocks + n, mask=n < blocks, other=0.0))
    count = tl.load(tied + row * blocks + n, mask=n < blocks, other=0)
    if CUT:
        tied_weight = tl.exp(-(cut.to(tl.float32, bitcast=True))).to(tl.float64)
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
    out = torch.empty(rows, width, dtype=torch.float32, device=device)
    cuts = torch.empty(2, rows, dtype=torch.int32, device=device)
    ties = torch.empty(rows, dtype=torch.int32, device=device)
    searches = [(limits, mass) for limits, mass in ((top_k, False), (top_p, True)) if limits is not None]
    for i, (limits, mass) in enumerate(searches):
        find_cut(
            flat,
            (values, ids),
            temperature,
            limits,
            cuts[i],
            ties,
            out.view(torch.int32),
            mass=mass,
            floors=cuts[0] if i else None,
            pdl=pdl,
        )
    cut = cuts[len(searches) - 1] if searches else cuts
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=device)
    tied = torch.empty(rows, blocks, dtype=torch.int32, device=device)
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
