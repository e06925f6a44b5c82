"""A device that runs out of memory or fails ends decoding with its cause, not with a traceback."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from nextn import api
from nextn.engine import engine as engine_module
from nextn.engine.cache import Cache
from nextn.engine.device_errors import device_errors
from nextn.engine.draft_vocab import DraftVocab
from nextn.engine.engine import Engine
from nextn.errors import NextnError
from tests.engine.models import decode, decoder


def test_what_fits_is_said_where_the_caches_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = 0

    def short(*args: Any, device: torch.device, **kwargs: Any) -> Cache:
        nonlocal wanted
        if device.type != "meta":
            raise torch.OutOfMemoryError
        made = Cache(*args, device=device, **kwargs)
        wanted = made.nbytes
        return made

    monkeypatch.setattr(engine_module, "Cache", short)
    # Others take memory between the look and the allocation.
    seen = iter([10**9, 50_000])
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: next(seen))
    with pytest.raises(NextnError, match="2 sequences") as caught:
        decode(Engine(decoder("qwen3_5"), draft_tokens=3), [[1, 2, 3], [4] * 90], max_tokens=8)
    found = re.search(r"and (\d+) positions take .* about (\d+) positions", caught.value.what)
    assert found is not None
    asked, fits = int(found[1]), int(found[2])
    assert asked >= 93 + 16
    assert fits == int(asked * 50_000 / wanted)
    assert 0 < fits < asked


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "memory ran out while decoding"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
            "^The memory ran out",
        ),
        (torch.AcceleratorError("CUDA error: an illegal memory access\nCUDA kernel errors", 700), "an illegal memory"),
    ],
)
def test_device_errors_keep_their_cause(error: Exception, what: str) -> None:
    with pytest.raises(NextnError, match=what) as caught, device_errors("decoding"):
        raise error
    assert "\n" not in caught.value.what


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="mine"), device_errors("decoding"):
        raise ValueError("mine")


def test_memory_that_runs_out_while_loading_is_told_with_the_weights_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried ...")

    monkeypatch.setattr(api, "load_decoder", short)
    with pytest.raises(NextnError, match=r"while loading 0\.1 GB of weights in float64") as caught:
        api.load(dtype="float64")
    assert "--dtype" in (caught.value.fix or "")


@pytest.mark.parametrize("where", ["_runner", "_cache"])
def test_memory_that_runs_out_before_decoding(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried ...")

    monkeypatch.setattr(Engine, where, short)
    with pytest.raises(NextnError, match="while preparing to decode"):
        decode(Engine(decoder("qwen3_5")), [[1, 2, 3]])


def test_memory_that_runs_out_for_the_draft_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried ...")

    monkeypatch.setattr(DraftVocab, "gather", short)
    with pytest.raises(NextnError, match="draft vocabulary") as caught:
        Engine(decoder("qwen3_5"), draft_vocab=[1, 2])
    assert caught.value.fix == "Draft from fewer ids."
