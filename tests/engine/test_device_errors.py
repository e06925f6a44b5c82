"""A device that runs out of memory or fails ends decoding with its cause, not with a traceback."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from nextn.engine import engine as engine_module
from nextn.engine.cache import Cache
from nextn.engine.device_errors import device_errors
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
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50_000, 100_000))
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
