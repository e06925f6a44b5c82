"""The Triton kernels of `draft_loss`: one program a row of logits, which it reads block by block.

Passes over a row: the draft's normaliser; the sums that the loss is made of; the gradient. ``ce``, and ``kl`` over a
full vocabulary, need no sums before the gradient and take two. The gradient overwrites the draft's logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.draft_loss import SMALLEST, Kind

BLOCK = 4096
KINDS = {"ce": 0, "kl": 1, "lk": 2, "lk_log": 3, "tv": 4}


@triton.jit
def _normaliser(row: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """log of the sum of exponentials of a row."""
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        z = tl.load(row + start + at, mask=start + at < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, z)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.exp(z - safe)
        top = higher
    highest = tl.max(top, 0)
    return tl.log(tl.sum(total * tl.exp(top - highest), 0)) + highest


@triton.jit
def _logsumexp(logits: tl.tensor, out: tl.tensor, stride: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, _normaliser(logits + row * stride, vocab, BLOCK))


@triton.jit
def _row_loss(
    draft: tl.tensor,
    teacher: tl.tensor,
    teacher_lse: tl.tensor,
    labels: tl.tensor,
    loss: tl.tensor,
    draft_row: tl.tensor,
    teacher_row: tl.tensor,
    vocab: tl.tensor,
    eta: tl.tensor,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    draft += row * draft_row
    teacher += row * teacher_row
    lse = _normaliser(draft, vocab, BLOCK)
    if KIND == 0:
        label = tl.load(labels + row)
        tl.store(loss + row, lse - tl.load(draft + label).to(tl.float32))
        for start in range(0, vocab, BLOCK):
            here = start + at
            z = tl.load(draft + here, mask=here < vocab, other=float("-inf")).to(tl.float32)
            slope = tl.exp(z - lse) - tl.where(here == label, 1.0, 0.0)
            tl.store(draft + here, slope.to(draft.dtype.element_ty), mask=here < vocab)
    else:
        norm = tl.load(teacher_lse + row)
        cross = tl.zeros((BLOCK,), tl.float32)
        mass = tl.zeros((BLOCK,), tl.float32)
        overlap = tl.zeros((BLOCK,), tl.float32)
        under = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            here = start + at
            inside = here < vocab
            log_q = tl.load(draft + here, mask=inside, other=0.0).to(tl.float32) - lse
            log_p = tl.load(teacher + here, mask=inside, other=0.0).to(tl.float32) - norm
            p = tl.where(inside, tl.exp(log_p), 0.0)
            q = tl.where(inside, tl.exp(log_q), 0.0)
            cross += p * (log_p - log_q)
            mass += p
            overlap += tl.minimum(p, q)
            under += tl.where(q < p, q, 0.0)
            if FULL and KIND == 1:
                tl.store(draft + here, (q - p).to(draft.dtype.element_ty), mask=inside)
        divergence = tl.sum(cross, 0)
        share = 1.0
        if not FULL:
            share = tl.maximum(tl.sum(mass, 0), SMALL)
            divergence -= share * tl.log(share)
        accepted = tl.sum(overlap, 0)
        below = tl.sum(under, 0)
        # The gradient is a (share q - p) + b (below q - [q < p] q).
        a = 1.0
        b = 0.0
        value = divergence
        if KIND == 2:
            a = tl.exp(-eta * accepted)
            b = 1.0 - a
            value = a * divergence + b * (1.0 - accepted)
        if KIND == 3:
            kept = tl.maximum(accepted, SMALL)
            a = 0.0
            b = 1.0 / kept
            value = -tl.log(kept)
        if KIND == 4:
            a = 0.0
            b = 1.0
            value = 1.0 - accepted
        tl.store(loss + row, value)
        if not (FULL and KIND == 1):
            for start in range(0, vocab, BLOCK):
                here = start + at
                inside = here < vocab
                q = tl.exp(tl.load(draft + here, mask=inside, other=float("-inf")).to(tl.float32) - lse)
                p = tl.exp(tl.load(teacher + here, mask=inside, other=float("-inf")).to(tl.float32) - norm)
                slope = a * (share * q - p) + b * (below * q - tl.where(q < p, q, 0.0))
                tl.store(draft + here, slope.to(draft.dtype.element_ty), mask=inside)


def logsumexp(logits: Tensor) -> Tensor:
    """log of the sum of exponentials of each row of [rows, vocab] -> [rows] float32."""
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _logsumexp[(logits.shape[0],)](logits, out, logits.stride(0), logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return out


def cross_entropy(draft: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As `draft_loss.cross_entropy`; the gradient replaces the logits, in their dtype."""
    loss = torch.empty(draft.shape[0], dtype=torch.float32, device=draft.device)
    _launch(draft, draft, loss, labels, loss, "ce", 0.0, full=True)
    return loss, draft


def distribution_loss(
    draft: Tensor, teacher: Tensor, teacher_lse: Tensor, kind: Kind, eta: float, *, full: bool
) -> tuple[Tensor, Tensor]:
    """As `draft_loss.distribution_loss`; the gradient replaces the draft's logits, in their dtype.

    Args:
        full: the vocabulary is the target's whole one, so that the target's mass there is 1.
    """
    loss = torch.empty(draft.shape[0], dtype=torch.float32, device=draft.device)
    _launch(draft, teacher, teacher_lse, teacher_lse, loss, kind, eta, full=full)
    return loss, draft


def _launch(
    draft: Tensor, teacher: Tensor, lse: Tensor, labels: Tensor, loss: Tensor, kind: Kind, eta: float, *, full: bool
) -> None:
    _row_loss[(draft.shape[0],)](
        draft,
        teacher,
        lse,
        labels,
        loss,
        draft.stride(0),
        teacher.stride(0),
        draft.shape[1],
        eta,
        KIND=KINDS[kind],
        FULL=full,
        SMALL=SMALLEST,
        BLOCK=BLOCK,
        num_warps=8,
    )
