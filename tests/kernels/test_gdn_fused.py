"""The chunked recurrence by flash-linear-attention: how it is called, and on a GPU what it gives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nextn.kernels import gdn
from nextn.kernels.gdn_fused import Bounds, available, gdn_chunk_fused, installed
from tests.kernels.cases import DEVICE, error, randn
from tests.kernels.flash_linear_attention import stand_in

LENGTHS = [70, 1, 129, 64]


def rows(k_heads: int, v_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    total = sum(LENGTHS)
    g = -torch.rand(1, total, v_heads, device=DEVICE)
    return (
        randn(1, total, k_heads, k_dim, dtype=dtype, seed=1),
        randn(1, total, k_heads, k_dim, dtype=dtype, seed=2),
        randn(1, total, v_heads, v_dim, dtype=dtype, seed=3),
        g,
        torch.rand(1, total, v_heads, device=DEVICE),
    )


def edges() -> list[int]:
    return [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]


def against_plain(sizes: tuple[int, int, int, int], dtype: torch.dtype, *, carried: bool, tolerance: float) -> None:
    inputs = rows(*sizes, dtype)
    state = randn(len(LENGTHS), sizes[1], sizes[2], sizes[3], seed=5) * 0.3 if carried else None
    out, last = gdn_chunk_fused(*inputs, state, Bounds(edges(), DEVICE))
    assert out.dtype == dtype
    assert (last is None) == (state is None)
    for n, (start, stop) in enumerate(pairwise(edges())):
        alone, after = gdn.gdn_chunk(
            *(x[:, start:stop].float() for x in inputs), state[n : n + 1] if state is not None else None
        )
        assert error(out[:, start:stop], alone) < tolerance
        if last is not None:
            assert last.dtype == torch.float32
            assert error(last[n : n + 1], after) < tolerance


@pytest.mark.parametrize("carried", [False, True])
def test_sequences_end_to_end_are_as_each_alone(carried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    against_plain((2, 4, 16, 32), torch.float32, carried=carried, tolerance=1e-5)


def test_only_half_precision_on_a_gpu_takes_it() -> None:
    assert not available(torch.zeros(1, dtype=torch.bfloat16))
    assert not available(torch.zeros(1, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(not installed(), reason="needs flash-linear-attention")
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("sizes", [(16, 32, 128, 128), (16, 16, 128, 128), (2, 4, 32, 64)])
def test_the_kernels_give_what_the_plain_one_gives(sizes: tuple[int, int, int, int], carried: bool) -> None:
    against_plain(sizes, torch.bfloat16, carried=carried, tolerance=1e-2)
