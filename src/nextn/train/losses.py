"""The loss of all draft steps, from hidden states, a few rows of the vocabulary at a time.

The output head is frozen, so a row's loss and its gradient by the head's output are known as soon as its logits are:
both are made in one visit, and logits are made once. The target's logits serve all draft steps, since the steps of
different chains that predict the same token have the same teacher. At no time do more than `chunk` rows of logits
exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nextn.kernels import draft_loss
from nextn.kernels.draft_loss import Kind
from nextn.kernels.norm import wide
from nextn.kernels.support import available

CHUNK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Logits that exist at once, by device type: what a CPU's caches hold; 128 MiB in float32, several times, on a GPU."""
LEAST_ROWS = 128
"""Rows that exist at once at least: with fewer, reading the output head takes longer than computing with it."""
FUSED_CHUNK_LOGITS = 1 << 27
"""The same with fused kernels, which leave logits in the model's dtype: 256 MiB in bfloat16, twice."""


@dataclass(frozen=True)
class LossSpec:
    """What is minimised.

    Attributes:
        kind: see `nextn.kernels.draft_loss`.
        weights: one a draft step; the total is their sum of the steps' mean losses.
        eta: of ``lk``.
        vocab: [ids] int64 in ascending order, the draft vocabulary; None is all.
        chunk: rows at a time; None by the device.
    """

    kind: Kind
    weights: Sequence[float]
    eta: float = 3.0
    vocab: Tensor | None = None
    chunk: int | None = None

    def draft_weight(self, weight: Tensor) -> Tensor:
        """The output head's rows [ids, hidden] that drafting uses."""
        return weight if self.vocab is None else weight.index_select(0, self.vocab)


def teachable(valid: Sequence[Tensor], ids: Tensor, spec: LossSpec) -> list[Tensor]:
    """`valid_rows` less those that the loss cannot teach: data tokens outside the draft vocabulary, for ``ce``."""
    if spec.kind != "ce" or spec.vocab is None:
        return list(valid)
    known = torch.isin(ids, spec.vocab)
    return [v & F.pad(known[:, k + 1 :], (0, min(k + 1, ids.shape[1]))) for k, v in enumerate(valid, 1)]


def chain_loss(
    outputs: Sequence[Tensor],
    teacher: Tensor,
    ids: Tensor,
    valid: Sequence[Tensor],
    weight: Tensor,
    counts: Tensor,
    spec: LossSpec,
    draft_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted loss of one packed batch as a share of an optimiser step's.

    Args:
        outputs: K of [1, T, hidden], the head's.
        teacher: [1, T, hidden], the target's after its final norm.
        ids: [1, T].
        valid: K of [1, T] bool, from `teachable`.
        weight: [vocab, hidden], the output head's, frozen.
        counts: [K], rows by draft step that the loss is the mean over: those of all packed batches of the step.
        draft_weight: from `spec.draft_weight`, made here if not given.
    Returns:
        (scalar loss, differentiable by `outputs`; [K] sums of the unweighted losses).
    """
    rows = torch.nonzero(valid[0][0])[:, 0] + 1
    chains = [(rows - k).clamp_min(0) for k in range(1, len(outputs) + 1)]
    active = torch.stack([v[0][at] & (rows >= k) for k, (v, at) in enumerate(zip(valid, chains, strict=True), 1)])
    states = torch.stack([out[0][at] for out, at in zip(outputs, chains, strict=True)])
    high = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scales = torch.tensor(list(spec.weights), dtype=high, device=weight.device) / counts.to(high).clamp_min(1)
    labels = ids[0][rows + 1]
    if spec.vocab is not None:
        labels = torch.searchsorted(spec.vocab, labels).clamp_max(len(spec.vocab) - 1)
    reduced = draft_weight if draft_weight is not None else spec.draft_weight(weight)
    loss, sums = _ChainLoss.apply(states, teacher[0][rows], labels, active, weight, reduced, scales, spec)
    return loss, sums


class _ChainLoss(torch.autograd.Function):
    """states [K, rows, hidden] -> (loss, sums [K]); the gradient is made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        teacher: Tensor,
        labels: Tensor,
        active: Tensor,
        weight: Tensor,
        reduced: Tensor,
        scales: Tensor,
        spec: LossSpec,
    ) -> tuple[Tensor, Tensor]:
        steps, rows, _ = states.shape
        fused = weight.dtype != torch.float64 and available(weight.device)
        held = FUSED_CHUNK_LOGITS if fused else CHUNK_LOGITS[weight.device.type]
        size = spec.chunk or max(held // weight.shape[0] // 16 * 16, LEAST_ROWS)
        sums = torch.zeros_like(scales)
        slopes = torch.empty_like(states)
        with torch.autocast(weight.device.type, enabled=False):
            for start in range(0, rows, size):
                part = slice(start, start + size)
                law = _Teacher.of(teacher[part], weight, spec, fused) if spec.kind != "ce" else None
                for k in range(steps):
                    draft = F.linear(states[k, part].to(weight.dtype), reduced)
                    loss, grad = _rows(draft, law, labels[part], spec, fused)
                    sums[k] += torch.where(active[k, part], loss, 0).sum()
                    share = active[k, part] * scales[k]
                    slopes[k, part] = ((grad.to(weight.dtype) @ reduced) * share[:, None]).to(slopes.dtype)
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(sums)
        return (sums * scales).sum(), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grads[0].to(slopes.dtype), *[None] * 7)


@dataclass(frozen=True, slots=True)
class _Teacher:
    """Some rows of the target's distribution: logits of the draft vocabulary, and the normaliser over all ids."""

    logits: Tensor
    lse: Tensor

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, spec: LossSpec, fused: bool) -> _Teacher:
        logits = F.linear(hidden.to(weight.dtype), weight)
        if fused:
            from nextn.kernels import draft_loss_triton

            lse = draft_loss_triton.logsumexp(logits)
        else:
            lse = wide(logits).logsumexp(-1)
        return cls(logits if spec.vocab is None else logits.index_select(1, spec.vocab), lse)


def _rows(draft: Tensor, law: _Teacher | None, labels: Tensor, spec: LossSpec, fused: bool) -> tuple[Tensor, Tensor]:
    """(loss [rows], gradient by the logits [rows, ids]); without a `law` against the labels."""
    if fused:
        from nextn.kernels import draft_loss_triton

        if law is None:
            return draft_loss_triton.cross_entropy(draft, labels)
        full = spec.vocab is None
        return draft_loss_triton.distribution_loss(draft, law.logits, law.lse, spec.kind, spec.eta, full=full)
    if law is None:
        return draft_loss.cross_entropy(draft, labels)
    return draft_loss.distribution_loss(draft, law.logits, law.lse, spec.kind, spec.eta)
