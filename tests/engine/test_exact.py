"""Exact decoding: a row's bits do not depend on the rows beside it, so tokens in bf16 do not depend on the head."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from nextn.checkpoint.source import open_checkpoint
from nextn.engine import engine as engine_module
from nextn.engine.cache import Cache
from nextn.engine.contexts import Rows
from nextn.engine.engine import Engine
from nextn.engine.fused import FusedRunner
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request
from nextn.errors import NextnError
from nextn.models.decoder import Decoder
from nextn.models.load import load_decoder
from tests.engine.models import decode
from tests.oracle.checkpoints import make_checkpoint

SMALL = {"hidden_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_hidden_layers": 2}
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "vocab_size": 5003,
}
BF16, F32 = torch.bfloat16, torch.float32


@functools.cache
def model(device: str, dtype: torch.dtype) -> Decoder:
    sizes = LARGE if device == "cuda" else {**SMALL, "layer_types": ["linear_attention", "full_attention"]}
    with tempfile.TemporaryDirectory() as folder:
        made = make_checkpoint(Path(folder), "qwen3_5", **sizes)
        return load_decoder(open_checkpoint(made), dtype=dtype, device=torch.device(device))[0]


ON_GPU = [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (BF16, F32)]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", BF16), *ON_GPU])
@torch.inference_mode()
def test_rows_together_have_the_bits_of_rows_alone(device: str, dtype: torch.dtype) -> None:
    """Two sequences of 4 rows in one forward, against each sequence alone, row by row."""
    m = model(device, dtype)
    sizes = {"pages": 8, "page_size": 64, "sequences": 2, "rows": 4}
    caches = [Cache(m.config, **sizes, dtype=dtype, device=m.embed.weight.device, replay=True) for _ in range(2)]
    together, alone = (FusedRunner(m, m, cache, longest=250, exact=True) for cache in caches)
    cuda = {"device": device}
    table = torch.tensor([[2, 5, 7], [1, 3, 6]], **cuda)
    slots, lengths = torch.tensor([1, 0], **cuda), torch.tensor([150, 3], **cuda)
    generator = torch.Generator(device).manual_seed(3)
    for name in ("k", "v", "states", "conv"):
        pool = getattr(caches[0], name)
        pool.copy_(torch.randn(pool.shape, generator=generator, dtype=pool.dtype, **cuda) * 0.3)
        getattr(caches[1], name).copy_(pool)
    ids = torch.tensor([[5, 9, 30, 7], [1, 80, 2, 44]], **cuda)
    positions = lengths[:, None] + torch.arange(4, **cuda)
    where = Rows(caches[0], table, positions, 0, slots, torch.zeros_like(slots))
    expected = together.logits(together.target_rows(ids, where)[0])
    for b in range(2):
        one = slice(b, b + 1)
        for i in range(4):
            committed = torch.full((1,), int(i > 0), **cuda)
            where = Rows(caches[1], table[one], positions[one, i : i + 1].contiguous(), 0, slots[one], committed)
            got = alone.logits(alone.target_rows(ids[one, i : i + 1], where)[0])
            assert torch.equal(got[0, 0], expected[b, i])


@pytest.mark.gpu
@pytest.mark.parametrize("k", [3, 8])
def test_tokens_with_and_without_the_head_are_the_same(k: int) -> None:
    m = model("cuda", BF16)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 5003, (3 + 2 * i,), generator=generator).tolist() for i in range(24)]
    runs = [decode(Engine(m, draft_tokens=n, exact=True), prompts, max_tokens=64) for n in (0, k)]
    assert [s.tokens for s in runs[1]] == [s.tokens for s in runs[0]]


@pytest.mark.parametrize(
    ("device", "count", "places"), [("cpu", 3, 2), pytest.param("cuda", 40, 6, marks=pytest.mark.gpu)]
)
def test_prompts_that_wait_for_places_have_the_same_tokens_too(
    device: str, count: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one length, which otherwise run together; when a place is free hangs on the head."""
    monkeypatch.setattr(engine_module, "AT_ONCE", places)
    m = model(device, BF16)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 90, (5,), generator=generator).tolist() for _ in range(count)]
    asked = [
        Request(p, SamplingParams(temperature=0.0, max_tokens=2 + i % (2 if device == "cpu" else 5)))
        for i, p in enumerate(prompts)
    ]
    found = []
    for k in (0, 1 if device == "cpu" else 3):
        engine = Engine(m, draft_tokens=k, exact=True, fused=True)
        found.append({s.index: s.tokens for news in engine.rounds(asked) for s, _ in news})
    assert found[1] == found[0]
    assert len(found[0]) == count


def test_where_the_kernels_cannot_run_it_is_refused() -> None:
    with pytest.raises(NextnError, match="NVIDIA GPU"):
        Engine(model("cpu", F32), exact=True, fused=False)
