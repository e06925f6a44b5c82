"""Losses of draft logits against a target's distribution, and their gradients, a row each.

With q the draft's distribution over the draft vocabulary and p the target's there (its mass m is below 1 where the
draft vocabulary is reduced), acceptance by rejection sampling is a = sum min(p, q) (Leviathan et al., 2023):

- ``ce``: -log q[label]
- ``kl``: m KL(p / m || q), which is KL(p || q) over a full vocabulary
- ``tv``: 1 - a, the total variation distance over a full vocabulary
- ``lk_log``: -log a, and ``lk``: w KL + (1 - w) (1 - a) with w = exp(-eta a) held constant
  (Samarin et al., LK Losses, arXiv 2602.23881)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nextn.kernels.norm import wide

Kind = Literal["ce", "kl", "lk", "lk_log", "tv"]
SMALLEST = 1e-8
"""Acceptance and mass are not taken to be smaller, so that their logarithms and quotients stay finite."""


def cross_entropy(draft: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Draft logits [rows, vocab], labels [rows] -> (loss [rows], its gradient by the logits), in at least float32."""
    log_q = wide(draft).log_softmax(-1)
    loss = -log_q.gather(-1, labels[:, None])[:, 0]
    grad = log_q.exp_()
    grad.scatter_add_(-1, labels[:, None], torch.full_like(labels[:, None], -1, dtype=grad.dtype))
    return loss, grad


def distribution_loss(
    draft: Tensor, teacher: Tensor, teacher_lse: Tensor, kind: Kind, eta: float
) -> tuple[Tensor, Tensor]:
    """Loss against the target's distribution.

    Args:
        draft: [rows, vocab] logits.
        teacher: [rows, vocab] the target's logits of the same ids.
        teacher_lse: [rows] log of the sum of exponentials of *all* the target's logits, in at least float32.
        kind: any but ``ce``.
        eta: of ``lk``.
    Returns:
        (loss [rows], its gradient by the draft logits [rows, vocab]), in at least float32.
    """
    log_q = wide(draft).log_softmax(-1)
    log_p = wide(teacher) - teacher_lse[:, None]
    p, q = log_p.exp(), log_q.exp()
    if kind == "kl":
        loss, mass = _kl(p, log_p, log_q)
        return loss, q.mul_(mass[:, None]).sub_(p)
    accepted = torch.minimum(p, q).sum(-1)
    below = torch.where(q < p, q, 0)
    fall = q * below.sum(-1, keepdim=True) - below
    if kind == "tv":
        return 1 - accepted, fall
    if kind == "lk_log":
        accepted = accepted.clamp_min(SMALLEST)
        return -accepted.log(), fall.div_(accepted[:, None])
    loss, mass = _kl(p, log_p, log_q)
    weight = (-eta * accepted).exp()
    grad = q.mul_(mass[:, None]).sub_(p).mul_(weight[:, None]).add_(fall.mul_(1 - weight[:, None]))
    return weight * loss + (1 - weight) * (1 - accepted), grad


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """(m KL(p / m || q), m), each [rows]."""
    mass = p.sum(-1).clamp_min(SMALLEST)
    return (p * (log_p - log_q)).sum(-1) - mass * mass.log(), mass
