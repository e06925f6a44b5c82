"""Logits of our definitions equal transformers', prefill and cached steps alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nextn.checkpoint.source import open_checkpoint
from nextn.models.context import SequenceContext
from nextn.models.load import load_decoder
from tests.oracle.checkpoints import KINDS, hf_model, make_checkpoint

CPU = torch.device("cpu")


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_sequence(tmp_path: Path, kind: str, tied: bool) -> None:
    theirs = hf_model(kind, tied=tied)
    model, report = load_decoder(
        open_checkpoint(make_checkpoint(tmp_path, kind, tied=tied)), dtype=torch.float32, device=CPU
    )
    ids = torch.randint(0, 97, (2, 83), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        hidden, _ = model(ids, SequenceContext(torch.arange(83).expand(2, -1)))
        assert relative(model.logits(hidden), theirs(ids).logits) < 1e-5
    assert report.head_bytes > 0
