"""Losses made in chunks equal their definitions over whole logits, in value and gradient, and never hold the whole."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nextn.kernels.draft_loss import Kind, distribution_loss
from nextn.train.layout import Layout
from nextn.train.losses import LossSpec, chain_loss, teachable
from nextn.train.unroll import valid_rows
from tests.train.packs import packed, random_documents

KINDS: tuple[Kind, ...] = get_args(Kind)
HIDDEN, VOCAB = 8, 23


def row_loss(kind: Kind, eta: float, z: Tensor, teacher: Tensor, label: int, vocab: list[int]) -> Tensor | None:
    """One row from the definition; z over the draft vocabulary, teacher over all ids."""
    log_q = z - torch.logsumexp(z, 0)
    if kind == "ce":
        return -log_q[vocab.index(label)] if label in vocab else None
    p = (teacher - torch.logsumexp(teacher, 0)).exp()[vocab]
    overlap = sum(torch.min(p[i], log_q[i].exp()) for i in range(len(vocab)))
    assert isinstance(overlap, Tensor)
    mass = p.sum()
    divergence = mass * ((p / mass) * ((p / mass).log() - log_q)).sum()
    if kind == "kl":
        return divergence
    if kind == "tv":
        return 1 - overlap
    if kind == "lk_log":
        return -overlap.log()
    share = math.exp(-eta * float(overlap.detach()))
    return share * divergence + (1 - share) * (1 - overlap)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    steps=st.integers(1, 4),
    chunk=st.integers(1, 12),
    reduced=st.booleans(),
    seed=st.integers(0, 999),
)
def test_equals_the_definition(
    kind: Kind, lengths: list[int], steps: int, chunk: int, reduced: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    batch = packed(random_documents(lengths, VOCAB, seed), padding=2)
    rows = batch.ids.shape[1]
    outputs = [random(1, rows, HIDDEN).requires_grad_() for _ in range(steps)]
    teacher, weight = random(1, rows, HIDDEN), random(VOCAB, HIDDEN)
    vocab = torch.randperm(VOCAB, generator=generator)[:9].sort().values if reduced else None
    weights = (torch.rand(steps, generator=generator) + 0.1).tolist()
    spec = LossSpec(kind, weights, eta=2.0, vocab=vocab, chunk=chunk)
    valid = teachable(valid_rows(batch, Layout(batch.documents), steps), batch.ids, spec)
    counts = torch.tensor([7.0, 5.0, 3.0, 2.0])[:steps]
    loss, sums = chain_loss(outputs, teacher, batch.ids, valid, weight, counts, spec)

    names = vocab.tolist() if vocab is not None else list(range(VOCAB))
    documents, ids = batch.documents[0].tolist(), batch.ids[0].tolist()
    expected = [torch.zeros((), dtype=torch.float64) for _ in range(steps)]
    for k in range(1, steps + 1):
        for t in range(rows - k - 1):
            if documents[t] == documents[t + k + 1] >= 0:
                z = (outputs[k - 1][0, t] @ weight.T)[names]
                value = row_loss(kind, 2.0, z, teacher[0, t + k] @ weight.T, ids[t + k + 1], names)
                if value is not None:
                    expected[k - 1] = expected[k - 1] + value
    total = sum(w * e / c for w, e, c in zip(weights, expected, counts, strict=True))
    assert isinstance(total, Tensor)
    assert torch.allclose(sums, torch.stack(expected), atol=1e-9)
    assert torch.allclose(loss, total, atol=1e-9)
    if not total.requires_grad:
        return
    mine = torch.autograd.grad(3 * loss, outputs)
    theirs = torch.autograd.grad(3 * total, outputs, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, torch.zeros_like(a) if b is None else b, atol=1e-9)


class Largest(TorchDispatchMode):
    """The most elements that any tensor held."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_never_holds_all_logits(kind: Kind) -> None:
    rows, vocab, chunk = 96, 512, 8
    batch = packed(random_documents((rows,), vocab))
    outputs = [torch.randn(1, rows, HIDDEN).requires_grad_() for _ in range(3)]
    valid = valid_rows(batch, Layout(batch.documents), 3)
    weight = torch.randn(vocab, HIDDEN)
    with Largest() as largest:
        spec = LossSpec(kind, [1, 1, 1], chunk=chunk)
        loss, _ = chain_loss(outputs, torch.randn(1, rows, HIDDEN), batch.ids, valid, weight, torch.ones(3), spec)
        loss.backward()
    assert largest.elements == chunk * vocab


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "ce"])
def test_perfect_drafts_have_no_loss(kind: Kind) -> None:
    """Nor a slope, where the loss has one there: total variation has a kink."""
    logits = torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    loss, grad = distribution_loss(logits + 7.0, logits, logits.logsumexp(-1), kind, 3.0)
    assert loss.abs().max() < 1e-12
    assert kind != "kl" or grad.abs().max() < 1e-12


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "ce"])
def test_descending_raises_acceptance(kind: Kind) -> None:
    """Each distribution loss, followed far enough, makes the draft the target's own law."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(4, 30, dtype=torch.float64, generator=generator) * 2
    draft = torch.randn(4, 30, dtype=torch.float64, generator=generator) * 2
    before = torch.minimum(draft.softmax(-1), teacher.softmax(-1)).sum(-1)
    for _ in range(400):
        _, grad = distribution_loss(draft, teacher, teacher.logsumexp(-1), kind, 3.0)
        draft = draft - 2.0 * grad
    after = torch.minimum(draft.softmax(-1), teacher.softmax(-1)).sum(-1)
    assert (after > before + 0.1).all()
    assert (after > 0.85).all()


def test_half_precision_stays_close() -> None:
    """Logits in bfloat16, as on a GPU: the loss and its gradient are those of float64 within bfloat16's rounding."""
    generator = torch.Generator().manual_seed(0)
    batch = packed(random_documents((40,), VOCAB))
    valid = valid_rows(batch, Layout(batch.documents), 2)
    results = []
    base = [torch.randn(1, 40, HIDDEN, generator=generator) for _ in range(3)]
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    for dtype in (torch.float64, torch.bfloat16):
        outputs = [x.to(dtype).requires_grad_() for x in base[:2]]
        spec = LossSpec("lk", [0.6, 0.4])
        loss, _ = chain_loss(
            outputs, base[2].to(dtype), batch.ids, valid, weight.to(dtype), torch.tensor([39.0, 38.0]), spec
        )
        results.append((loss.double(), torch.autograd.grad(loss, outputs)[0].double()))
    (exact, slope), (rounded, rough) = results
    assert abs(exact - rounded) < 0.02 * exact
    assert (slope - rough).norm() < 0.05 * slope.norm()
