"""On a GPU: fused attention, recurrence and losses against the plain ones, and the memory of a large vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from nextn.kernels import gdn
from nextn.kernels.draft_loss import Kind
from nextn.kernels.gdn_fused import installed
from nextn.train import contexts, losses
from nextn.train.layout import Layout
from nextn.train.losses import LossSpec, chain_loss
from nextn.train.processes import processes
from nextn.train.trainer import Trainer
from nextn.train.unroll import valid_rows
from tests.train import runs
from tests.train.packs import packed, random_documents

pytestmark = pytest.mark.gpu
LENGTHS, PADDING = (700, 1, 129, 300, 256, 2), 41


def distance(mine: Tensor, theirs: Tensor) -> float:
    theirs = theirs.double().cpu()
    return float((mine.double().cpu() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("steps", [1, 3])
def test_attention_and_its_gradient(steps: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = packed(random_documents(LENGTHS), PADDING)
    rows = batch.ids.shape[1]
    shapes = [(1, rows, 8, head_dim)] + [(1, rows, 2, head_dim)] * (2 * steps)
    exact = [torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator) * (batch.documents >= 0)[..., None, None]
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        parts = [x.to(device, dtype).requires_grad_() for x in exact]
        keys = list(zip(parts[1::2], parts[2::2], strict=True))
        out = contexts.chain_attention(Layout(batch.documents.to(device)), parts[0], keys)
        real = out[:, batch.documents[0].to(device) >= 0]
        slopes = torch.autograd.grad((out * weight.to(device, dtype)).sum(), parts)
        results.append((real.detach(), *slopes))
    for fused, plain in zip(results[1], results[0], strict=True):
        assert distance(fused, plain) < 0.02


@pytest.mark.skipif(not installed(), reason="needs flash-linear-attention")
def test_recurrence_inside_documents() -> None:
    layout = Layout(packed(random_documents(LENGTHS), PADDING).documents.cuda())
    rows = layout.documents.shape[1]
    q, k = (torch.randn(1, rows, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, rows, 8, 128, device="cuda", dtype=torch.bfloat16)
    g, beta = -torch.rand(1, rows, 8, device="cuda"), torch.rand(1, rows, 8, device="cuda")
    fused = contexts._delta_fused(layout, q, k, v, g, beta)
    for start, stop in layout.spans:
        alone, _ = gdn.gdn_chunk(*(x[:, start:stop].float() for x in (q, k, v, g, beta)), None)  # type: ignore[call-arg, arg-type]
        assert distance(fused[:, start:stop], alone) < 0.02


@pytest.mark.parametrize("hidden", [256, 2560])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_losses_of_a_large_vocabulary_fit(kind: Kind, hidden: int) -> None:
    """8,192 tokens at vocabulary 248,320: under 2 GB beyond weights and hidden states, and the plain loss's value."""
    rows, vocab = 8192, 248_320
    batch = packed(random_documents((rows,), vocab)).to("cuda")
    valid = valid_rows(batch, Layout(batch.documents), 3)
    torch.manual_seed(0)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) * (1.6 / hidden**0.5)
    outputs = [torch.randn(1, rows, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    teacher = torch.randn(1, rows, hidden, device="cuda", dtype=torch.bfloat16)
    counts = torch.stack([v.sum() for v in valid])
    spec = LossSpec(kind, [0.5, 0.3, 0.2])
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    loss, _ = chain_loss(outputs, teacher, batch.ids, valid, weight, counts, spec)
    loss.backward()
    assert torch.cuda.max_memory_allocated() - held < 2 << 30
    few = [v.clone() for v in valid]
    for v in few:
        v[:, 64:] = False
    fused, _ = chain_loss(outputs, teacher, batch.ids, few, weight, counts, spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "available", lambda device: False)
        plain, _ = chain_loss(outputs, teacher, batch.ids, few, weight, counts, spec)
    assert float(fused.detach()) == pytest.approx(float(plain.detach()), rel=2e-3)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3"])
def test_steps_follow_those_of_the_cpu(tmp_path: Path, kind: str) -> None:
    """The same run in float32 on both devices, and in bfloat16 near it."""
    model = runs.target(tmp_path / "model", kind)
    runs.data(tmp_path / "data.jsonl", repeat=True)
    found = {}
    for name, device, cast in (("cpu", "cpu", "off"), ("gpu", "cuda", "off"), ("half", "cuda", "bfloat16")):
        made = runs.config(
            tmp_path, model, output=str(tmp_path / name), device=device, autocast=cast, target_dtype="float32"
        )
        with processes(device) as group:
            Trainer(made, group, runs.reader, quiet=True).run()
        found[name] = runs.losses(made)
    assert found["gpu"] == pytest.approx(found["cpu"], rel=2e-3)
    assert found["half"] == pytest.approx(found["cpu"], rel=0.05)
