"""Head norms, rotation, the write into pages and attention over them: fused kernels against the plain functions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels import attention, rope
from tests.kernels.cases import DEVICE, DTYPES, close, partials, poison, randn, real

pytest.importorskip("triton")
from nextn.kernels import attention_triton, rope_triton


def pages_for(lengths: list[int], page: int, spare: int = 2) -> tuple[Tensor, int]:
    """A table of shuffled, disjoint pages that leaves out pages 0 and the last ones, and the number of pages."""
    per = -(-max(lengths) // page) + 1
    used = torch.randperm(per * len(lengths), generator=torch.Generator().manual_seed(1)) + 1
    return used.view(len(lengths), per).to(DEVICE), per * len(lengths) + 1 + spare


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,heads,kv_heads,dim,half,gated,norm,bias,splits",
    [(1, 4, 2, 32, 4, True, True, False, 0), (3, 2, 1, 64, 32, False, False, True, 2),
     (2, 3, 3, 24, 6, True, True, False, 3),
     (9, 2, 2, 16, 8, False, True, False, 1), real(4, 16, 4, 256, 32, True, True, False, 2),
     real(9, 8, 2, 256, 32, True, True, False, 0)],
)  # fmt: skip
def test_heads_are_normed_rotated_and_stored(
    rows: int, heads: int, kv_heads: int, dim: int, half: int, gated: bool, norm: bool, bias: bool, splits: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    lengths, page = [5, 17], 4
    table, count = pages_for([n + rows for n in lengths], page)
    positions = torch.tensor(lengths, device=DEVICE)[:, None] + torch.arange(rows, device=DEVICE)
    step = 2 * dim if gated else dim
    width = heads * step + 2 * kv_heads * dim
    x = partials(randn(2 * rows, width, dtype=dtype), splits)
    offset = randn(width, seed=3, dtype=dtype) if bias else None
    q_scale, k_scale = (1 + 0.2 * randn(dim, seed=s) if norm else None for s in (4, 5))
    inv_freq = 10.0 ** -(torch.arange(half, device=DEVICE) / half)
    cos, sin = rope.rope_tables(torch.arange(40, device=DEVICE)[None], inv_freq, 1.0, dtype)
    pools = [poison(count, page, kv_heads, dim, dtype=dtype) for _ in range(4)]
    q = rope_triton.qkv_to_pages(
        x, heads, q_scale, k_scale, 1e-6, cos.view(-1, half), sin.view(-1, half), positions, table, pools[0], pools[1],
        q_step=step, bias=offset,
    )  # fmt: skip

    stored = x.sum(0).to(dtype) if splits else x
    stored = (stored + offset if offset is not None else stored).view(2, rows, -1)
    parts = stored.split((heads * step, kv_heads * dim, kv_heads * dim), -1)
    plain_q, plain_k, plain_v = (
        t.view(2, rows, -1, s)[..., :dim] for t, s in zip(parts, (step, dim, dim), strict=True)
    )
    plain_q, plain_k = rope.qk_norm_rope(
        plain_q, plain_k, q_scale, k_scale, 1e-6, rope.rope_tables(positions, inv_freq, 1.0, dtype)
    )
    attention.write_kv(plain_k, plain_v, pools[2], pools[3], attention.slots_of(table, positions, page))
    assert close(q, plain_q.reshape(2 * rows, heads, dim))
    for got, expected in ((pools[0], pools[2]), (pools[1], pools[3])):
        assert torch.equal(got.isnan(), expected.isnan())
        assert close(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("unsettled", [None, 0, 20, -50])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,heads,kv_heads,dim,page,lengths,parts,gate_splits",
    [(1, 4, 2, 32, 16, [1, 40], None, None), (4, 2, 1, 64, 8, [70, 33], 2, 0), (2, 6, 2, 24, 4, [9, 100, 31], 5, 2),
     (9, 2, 2, 16, 16, [0, 1], 4, None), real(4, 16, 4, 256, 64, [1024] * 8, 16, 0),
     real(1, 8, 2, 256, 16, [5, 4000, 777], 32, 2), real(9, 16, 4, 64, 64, [300] * 32, 8, None)],
)  # fmt: skip
def test_attention_over_pages(
    rows: int, heads: int, kv_heads: int, dim: int, page: int, lengths: list[int], parts: int | None,
    gate_splits: int | None, dtype: torch.dtype, unsettled: int | None,
) -> None:  # fmt: skip
    batch = len(lengths)
    table, count = pages_for([n + rows for n in lengths], page)
    positions = torch.tensor(lengths, device=DEVICE)[:, None] + torch.arange(rows, device=DEVICE)
    k_pool, v_pool = (poison(count, page, kv_heads, dim, dtype=dtype) for _ in range(2))
    filled = torch.arange(max(lengths) + rows, device=DEVICE)
    for b, length in enumerate(lengths):
        slots = attention.slots_of(table[b : b + 1], filled[None, : length + rows], page)
        fresh = (randn(1, length + rows, kv_heads, dim, dtype=dtype, seed=s + b) for s in (0, 50))
        attention.write_kv(*fresh, k_pool, v_pool, slots)
    q = randn(batch * rows, heads, dim, dtype=dtype, seed=99)
    gate, opened = None, torch.ones(1, device=DEVICE)
    if gate_splits is not None:
        product = randn(batch * rows, heads * 2 * dim + 8, dtype=dtype, seed=98)
        gate = partials(product, gate_splits)[..., dim:]
        opened = (
            product[:, : heads * 2 * dim]
            .view(-1, heads, 2 * dim)[..., dim:]
            .reshape(batch * rows, -1)
            .float()
            .sigmoid()
        )
    before = k_pool.clone(), v_pool.clone()
    got = attention_triton.paged_attention(
        q, k_pool, v_pool, table, positions, dim**-0.5, parts=parts, keys=16 if DEVICE.type == "cpu" else 32, gate=gate,
        settled=None if unsettled is None else (positions[:, 0] - unsettled).clamp(min=0),
    )  # fmt: skip
    # The plain function reads whole pages: what lies past a sequence's end must be finite there.
    expected = attention.paged_attention(
        q.view(batch, rows, heads, dim).float(), k_pool.nan_to_num().float(), v_pool.nan_to_num().float(), table,
        positions, max(lengths) + rows, dim**-0.5,
    )  # fmt: skip
    assert got.dtype == dtype
    assert close(got, expected.reshape(batch * rows, -1) * opened)
    for pool, old in zip((k_pool, v_pool), before, strict=True):
        assert torch.equal(pool.isnan(), old.isnan())
        assert torch.equal(pool.nan_to_num(), old.nan_to_num())


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 1 << 20), st.sampled_from([16, 32, 64]))
def test_the_number_of_programs_fills_the_card_and_leaves_none_without_a_tile(
    batch: int, kv_heads: int, positions: int, keys: int
) -> None:
    parts = attention_triton.parts_for(batch, kv_heads, positions, keys)
    batch = 1 << (batch - 1).bit_length()
    assert parts == attention_triton.parts_for(batch, kv_heads, positions, keys)
    assert 1 <= parts <= 64
    assert (parts - 1) * keys < positions
    assert (parts - 1) * batch * kv_heads < attention_triton.PROGRAMS
    enough = parts * batch * kv_heads >= attention_triton.PROGRAMS
    assert enough or parts == 64 or parts * keys >= positions


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    table, count = pages_for([40], 8)
    k_pool, v_pool = randn(count, 8, 1, 32), randn(count, 8, 1, 32, seed=1)
    q = randn(4, 2, 32, seed=2)
    positions = torch.arange(30, 34, device=DEVICE)[None]
    together = attention_triton.paged_attention(q, k_pool, v_pool, table, positions, 0.2, parts=3, keys=16)
    for i in range(4):
        alone = attention_triton.paged_attention(
            q[i : i + 1], k_pool, v_pool, table, positions[:, i : i + 1].contiguous(), 0.2, parts=3, keys=16
        )
        # The interpreter's products round by a row's place in the tile.
        assert torch.equal(alone[0], together[i]) if i == 0 or DEVICE.type == "cuda" else close(alone[0], together[i])


@pytest.mark.parametrize("starts", [[0, 0, 0], [16, 16, 16], [0, 21, 0], [3, 40, 9]])
@pytest.mark.parametrize("heads,kv_heads,dim", [(4, 2, 32), (3, 3, 24), real(16, 4, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompts_rows_see_what_paged_attention_shows(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, starts: list[int]
) -> None:
    rows, page = 13, 8
    table, count = pages_for([s + rows for s in starts], page)
    k_pool, v_pool = (randn(count, page, kv_heads, dim, seed=s, dtype=dtype) for s in (1, 2))
    q = randn(len(starts), rows, heads, dim, dtype=dtype)
    positions = torch.tensor(starts, device=DEVICE)[:, None] + torch.arange(rows, device=DEVICE)
    got = attention.prefill_attention(q, k_pool, v_pool, table, starts, dim**-0.5)
    expected = attention.paged_attention(
        *(t.float() for t in (q, k_pool, v_pool)), table, positions, max(starts) + rows, dim**-0.5
    )
    assert close(got, expected)
