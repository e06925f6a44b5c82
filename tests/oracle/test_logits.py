"""Logits of our definitions equal transformers', prefill and cached steps alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nextn.checkpoint.source import open_checkpoint
from nextn.engine.cache import Cache
from nextn.engine.contexts import Rows, TargetContext
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


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_chunks_and_cached_steps(tmp_path: Path, kind: str) -> None:
    """Chunked prefill, then forwards of 1 to 5 rows over the caches, each starting from a chosen snapshot."""
    theirs = hf_model(kind)
    model, _ = load_decoder(open_checkpoint(make_checkpoint(tmp_path, kind)), dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(0, 97, (1, 60), generator=generator)
    expected = theirs(ids).logits[0]
    cache = Cache(model.config, pages=20, page_size=8, sequences=2, rows=5, dtype=torch.float32, device=CPU)
    cache.take(8)
    pages, slot = cache.take(80)
    table, slots = torch.tensor([pages]), torch.tensor([slot])

    def forward(start: int, rows: torch.Tensor, committed: int, prefill: bool) -> torch.Tensor:
        positions = torch.arange(start, start + rows.shape[1])[None]
        where = Rows(
            cache,
            table,
            positions,
            start + rows.shape[1],
            slots,
            torch.tensor([committed]),
            starts=[start] if prefill else None,
        )
        hidden, _ = model(rows, TargetContext(where))
        return model.logits(hidden[0])

    with torch.no_grad():
        done = 0
        for size in (1, 2, 13, 7):
            logits = forward(done, ids[:, done : done + size], 1, prefill=True)
            assert relative(logits, expected[done : done + size]) < 1e-5
            done += size
        committed = 1
        while done + 5 <= 60:
            kept = int(torch.randint(1, 6, (), generator=generator))
            garbage = torch.randint(0, 97, (1, 5 - kept), generator=generator)
            rows = torch.cat((ids[:, done : done + kept], garbage), 1)
            logits = forward(done, rows, committed, prefill=False)
            assert relative(logits[:kept], expected[done : done + kept]) < 1e-5
            done, committed = done + kept, kept


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_next", "qwen3_5"])
def test_attention_biases(tmp_path: Path, kind: str) -> None:
    theirs = hf_model(kind, attention_bias=True)
    made = make_checkpoint(tmp_path, kind, attention_bias=True)
    model, _ = load_decoder(open_checkpoint(made), dtype=torch.float32, device=CPU)
    ids = torch.randint(0, 97, (1, 50), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        hidden, _ = model(ids, SequenceContext(torch.arange(50)[None]))
        assert relative(model.logits(hidden), theirs(ids).logits) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_scaled_rope(tmp_path: Path, kind: str, rope: dict[str, Any]) -> None:
    theirs = hf_model(kind, rope_parameters=rope)
    made = make_checkpoint(tmp_path, kind, rope_parameters=rope)
    model, _ = load_decoder(open_checkpoint(made), dtype=torch.float32, device=CPU)
    ids = torch.randint(0, 97, (1, 50), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        hidden, _ = model(ids, SequenceContext(torch.arange(50)[None]))
        assert relative(model.logits(hidden), theirs(ids).logits) < 1e-5
