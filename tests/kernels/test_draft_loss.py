"""The fused row losses against their plain definitions, value and gradient."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from nextn.kernels import draft_loss
from nextn.kernels.draft_loss import Kind
from tests.kernels.cases import DEVICE, DTYPES, close, error, randn, real

pytest.importorskip("triton")
from nextn.kernels import draft_loss_triton
from nextn.train import losses

SHAPES = [(3, 50), (2, 5000), real(270, 248_320), real(64, 32_768)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [k for k in get_args(Kind) if k != "ce"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("rows,vocab", SHAPES)
def test_distribution_losses(dtype: torch.dtype, kind: Kind, reduced: bool, rows: int, vocab: int) -> None:
    draft, teacher = randn(rows, vocab, dtype=dtype) * 3, randn(rows, vocab, dtype=dtype, seed=1) * 3
    lse = draft_loss_triton.logsumexp(teacher)
    assert close(lse, teacher.float().logsumexp(-1))
    if reduced:
        draft, teacher = draft[:, : vocab // 3].contiguous(), teacher[:, : vocab // 3]
    expected, slope = draft_loss.distribution_loss(draft, teacher, lse, kind, 3.0)
    found, grad = draft_loss_triton.distribution_loss(draft, teacher, lse, kind, 3.0, full=not reduced)
    assert grad is draft
    assert error(found, expected) < 1e-5
    assert close(grad, slope)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,vocab", SHAPES)
def test_cross_entropy(dtype: torch.dtype, rows: int, vocab: int) -> None:
    draft = randn(rows, vocab, dtype=dtype) * 3
    labels = torch.arange(rows, device=DEVICE) * 7 % vocab
    expected, slope = draft_loss.cross_entropy(draft, labels)
    found, grad = draft_loss_triton.cross_entropy(draft, labels)
    assert error(found, expected) < 1e-5
    assert close(grad, slope)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("reduced", [False, True])
def test_the_losses_of_a_batch(kind: Kind, reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's loss and gradient through the kernels are those through the plain functions."""
    outputs = [randn(1, 21, 16, seed=k).requires_grad_() for k in range(2)]
    teacher, weight = randn(1, 21, 16, seed=7), randn(60, 16, seed=8)
    ids = torch.arange(21, device=DEVICE)[None] * 3 % 60
    valid = [torch.arange(21, device=DEVICE)[None] < n for n in (19, 18)]
    vocab = torch.arange(0, 60, 3, device=DEVICE) if reduced else None
    spec = losses.LossSpec(kind, [0.6, 0.4], vocab=vocab, chunk=5)
    counts = torch.tensor([19.0, 18.0], device=DEVICE)
    results = []
    for fused in (False, True):
        monkeypatch.setattr(losses, "available", lambda device, fused=fused: fused)
        loss, sums = losses.chain_loss(outputs, teacher, ids, valid, weight, counts, spec)
        results.append((loss.detach()[None], sums, *torch.autograd.grad(loss, outputs)))
    for plain, kernel in zip(*results, strict=True):
        assert close(kernel, plain)
