"""What is sure not to fit into memory is refused, and nothing that may fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nextn.assets import embedded_model
from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.models.config import DecoderConfig, decoder_config
from nextn.train import room
from nextn.train.config import load_config
from nextn.train.packing import Document, pack
from nextn.train.processes import Processes
from nextn.train.start import start
from nextn.train.unroll import unrolled_logits
from tests.train.packs import random_documents

CPU = Processes(0, 1, torch.device("cpu"))


@pytest.fixture
def target() -> DecoderConfig:
    return decoder_config(open_checkpoint(embedded_model()).config)


def refused(
    target: DecoderConfig, free: int, monkeypatch: pytest.MonkeyPatch, *words: str, rows: int = 1, size: int = 4
) -> str | None:
    monkeypatch.setattr(room, "free_bytes", lambda device: free)
    config = load_config(None, ["data=a", *words])
    try:
        room.require_room(config, target, size, CPU, steps=config.unroll, rows=rows)
    except NextnError as error:
        return error.what
    return None


def test_the_bound_is_that_of_one_forward(target: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """[1000 tokens, 256 channels] in 4 bytes: three of the target, twelve of each of two draft steps."""
    words = ("batch_tokens=1000", "unroll=2")
    needed = 1000 * 256 * 4 * 27
    assert refused(target, needed, monkeypatch, *words) is None
    assert "batch_tokens = 1,000 takes over 0.0 GB" in (refused(target, needed - 1, monkeypatch, *words) or "")
    assert refused(target, needed // 2, monkeypatch, *words, size=2) is None


def test_millions_of_tokens_a_step_are_a_matter_of_accumulation(
    target: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight million, at Qwen3.5-4B's width, on a GPU: rows of 8,192 fit, one row of them all does not."""
    wide, free = replace(target, hidden=2560), 139 << 30
    rows = ("batch_tokens=8192", "accumulation=1024")
    assert refused(wide, free, monkeypatch, *rows, rows=1024, size=2) is None
    assert "One forward of batch_tokens = 8,388,608" in (
        refused(wide, free, monkeypatch, "batch_tokens=8388608", size=2) or ""
    )
    assert "The rows of a step take 204.8 GB" in (
        refused(wide, free, monkeypatch, "batch_tokens=8192", "accumulation=1000000", rows=1000000, size=2) or ""
    )


@pytest.mark.parametrize("unroll", [1, 3])
def test_a_forward_takes_more_than_the_bound(unroll: int) -> None:
    """Measured as what autograd keeps of a step of the embedded model."""
    begun = start(load_config(None, ["data=a", f"unroll={unroll}", "device=cpu"]), CPU)
    text = [Document(d, [True] * len(d)) for d in random_documents([400] * 5, 4000, 0)]
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in begun.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        unrolled_logits(begun.model, pack(text), unroll)
    taken = sum(size for at, size in kept.items() if at not in weights)
    assert taken > room.least_bytes(2000, 256, unroll, 4)
