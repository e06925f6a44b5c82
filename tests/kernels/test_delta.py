"""The delta net's step on caches: snapshots, replay and the fused kernel against whole-sequence definitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nextn.kernels import delta, gdn, norm
from nextn.kernels.delta import DeltaLog, DeltaWeights
from tests.kernels.cases import DEVICE, DTYPES, TOLERANCE, error, partials, poison, randn, real

SMALL = (2, 16, 4, 32, 4)
"""k_heads, k_dim, v_heads, v_dim, kernel."""


def weights_of(k_heads: int, k_dim: int, v_heads: int, v_dim: int, kernel: int, dtype: torch.dtype) -> DeltaWeights:
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    high = torch.float64 if dtype == torch.float64 else torch.float32
    return DeltaWeights(
        conv=randn(channels, kernel, seed=11).to(dtype),
        a_log=randn(v_heads, seed=12).to(high) * 0.3,
        dt_bias=randn(v_heads, seed=13).to(high),
        scale=1 + 0.1 * randn(v_dim, seed=14).to(high),
        eps=1e-6,
        k_heads=k_heads,
        k_dim=k_dim,
        v_heads=v_heads,
        v_dim=v_dim,
    )


class Caches:
    """Pools of `slots` sequences with guard slots around those in use, all poisoned."""

    def __init__(self, w: DeltaWeights, slots: int, rows: int, dtype: torch.dtype, *, replay: bool) -> None:
        high = torch.float64 if dtype == torch.float64 else torch.float32
        state = (w.v_heads, w.k_dim, w.v_dim)
        self.ring = poison(slots, w.conv.shape[1] - 1 + rows, w.conv.shape[0], dtype=dtype)
        self.states = poison(slots, *(() if replay else (rows,)), *state, dtype=high)
        self.log = DeltaLog(
            poison(slots, 2 * rows, w.k_heads, w.k_dim, dtype=high),
            poison(slots, 2 * rows, w.v_heads, w.v_dim, dtype=high),
            poison(slots, 2 * rows, w.v_heads, dtype=high),
        )

    def all(self) -> list[Tensor]:
        return [self.ring, self.states, self.log.k, self.log.u, self.log.g]


def whole_sequence(w: DeltaWeights, x: Tensor) -> Tensor:
    """The layer over sequences without caches: [batch, rows, sum(sizes)] -> [batch, rows, v_heads * v_dim]."""
    batch, rows, _ = x.shape
    mixed, z, b, a = x.split(w.sizes, -1)
    convolved = gdn.causal_conv(F.pad(mixed, (0, 0, w.conv.shape[1] - 1, 0)), w.conv)
    key = w.k_heads * w.k_dim
    q, k, v = convolved.split((key, key, w.v_heads * w.v_dim), -1)
    out, _ = gdn.gdn_chunk(
        q.view(batch, rows, w.k_heads, -1),
        k.view(batch, rows, w.k_heads, -1),
        v.view(batch, rows, w.v_heads, -1),
        *gdn.decay_and_strength(a, b, w.a_log, w.dt_bias),
        None,
    )
    return norm.gated_rms_norm(out, z.view(batch, rows, w.v_heads, -1), w.scale, w.eps).reshape(batch, rows, -1)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("kernel", [2, 4])
def test_rounds_of_rows_with_rejections_equal_the_whole_sequence(replay: bool, kernel: int) -> None:
    """Rounds of 1 to 3 rows of which some are thrown away leave what the accepted rows alone leave (float64)."""
    w = weights_of(*SMALL[:4], kernel, torch.float64)
    rows, batch, total = 3, 2, 14
    x = randn(batch, total + rows, sum(w.sizes)).double()
    noise = randn(batch, total + rows, sum(w.sizes), seed=5).double()
    caches = Caches(w, batch, rows, torch.float64, replay=replay)
    slot = torch.tensor([1, 0], device=DEVICE)
    start = torch.zeros_like(slot)
    if replay:
        caches.states.zero_()
    else:
        caches.states[:, 0] = 0
    length, last = start.clone(), start.clone()
    got = torch.zeros(batch, total + rows, w.v_heads * w.v_dim, dtype=torch.float64, device=DEVICE)
    accepts = torch.tensor([[1, 3], [3, 1], [2, 2], [1, 2], [3, 3], [2, 1]], device=DEVICE)
    for accepted in accepts:
        at = length[:, None] + torch.arange(rows, device=DEVICE)
        keep = torch.arange(rows, device=DEVICE) < accepted[:, None]
        b = torch.arange(batch, device=DEVICE)[:, None]
        given = torch.where(keep[..., None], x[b, at], noise[b, at])
        flat = given.reshape(batch * rows, -1)
        if replay:
            out = delta.delta_replay(w, flat, caches.ring, caches.states, caches.log, slot, length, last)
            last = accepted
        else:
            out = delta.delta_snapshots(w, flat, caches.ring, caches.states, slot, length, last)
            last = accepted - 1
        got[b, at] = out.view(batch, rows, -1)
        length = length + accepted
    expected = whole_sequence(w, x)
    for i in range(batch):
        assert error(got[i, : length[i]], expected[i, : length[i]]) < 1e-10


FUSED = [
    (1, 2, SMALL, 0), (3, 2, SMALL, 2), (9, 1, SMALL, 0), (2, 2, (1, 32, 1, 16, 3), 1), (4, 1, (2, 16, 2, 16, 4), 3),
    real(1, 1, (16, 128, 32, 128, 4), 2), real(4, 8, (16, 128, 32, 128, 4), 0), real(9, 2, (16, 128, 16, 128, 4), 4),
    real(4, 32, (16, 128, 16, 128, 4), 0), real(4, 2, (16, 128, 32, 128, 4), 2), real(1, 32, (16, 128, 32, 128, 4), 0),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("rows,batch,shape,splits", FUSED)
def test_the_kernel_equals_the_plain_step(
    rows: int, batch: int, shape: tuple[int, int, int, int, int], splits: int, replay: bool, dtype: torch.dtype
) -> None:
    compare(rows, batch, shape, splits, replay=replay, dtype=dtype)


@pytest.mark.parametrize("replay", [False, True])
def test_programs_of_many_columns_equal_the_plain_step(replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As hundreds of heads have them."""
    pytest.importorskip("triton")
    from nextn.kernels import delta_triton

    wide = delta_triton.program_of(512, 32)
    monkeypatch.setattr(delta_triton, "program_of", lambda batch, v_heads: wide)
    compare(3, 2, (1, 16, 2, 128, 4), 0, replay=replay, dtype=torch.bfloat16)


def compare(
    rows: int, batch: int, shape: tuple[int, int, int, int, int], splits: int, *, replay: bool, dtype: torch.dtype
) -> None:
    """Two steps by the kernel and by the plain functions, on random caches between poisoned ones."""
    pytest.importorskip("triton")
    from nextn.kernels import delta_triton

    # Oracle: the plain step in float32 on the same rounded values, so that only the kernel's own roundings differ.
    w = weights_of(*shape, dtype)
    exact = weights_of(*shape, torch.float32)
    exact = DeltaWeights(w.conv.float(), *[getattr(exact, n) for n in list(DeltaWeights.__slots__)[1:]])
    mine, plain = (Caches(w, batch + 2, rows, d, replay=replay) for d in (dtype, torch.float32))
    slot = (torch.randperm(batch, device=DEVICE) + 1).to(torch.int32)
    length = torch.arange(batch, device=DEVICE) % 3
    for caches in (mine, plain):
        for i, pool in enumerate(caches.all()):
            value = randn(*pool[1:-1].shape, seed=20 + i) * 0.1
            pool[1:-1] = value.to(dtype) if pool is caches.ring else value
    last = torch.arange(batch, device=DEVICE) % rows
    for step in range(2):
        x = partials(randn(batch * rows, sum(w.sizes), dtype=dtype, seed=step), splits)
        stored = x.sum(0).to(dtype).float() if splits else x.float()
        if replay:
            got = delta_triton.delta_replay(w, x, mine.ring, mine.states, mine.log, slot, length, last)
            out = delta.delta_replay(exact, stored, plain.ring, plain.states, plain.log, slot.long(), length, last)
        else:
            got = delta_triton.delta_snapshots(w, x, mine.ring, mine.states, slot, length, last)
            out = delta.delta_snapshots(exact, stored, plain.ring, plain.states, slot.long(), length, last)
        assert got.dtype == dtype
        assert error(got, out) < TOLERANCE[dtype]
        accepted = 1 + torch.arange(batch, device=DEVICE) % rows
        last = accepted if replay else accepted - 1
        length = length + accepted
    for a, b in zip(mine.all(), plain.all(), strict=True):
        assert a[[0, -1]].isnan().all()
        assert torch.equal(a.isnan(), b.isnan())
        if not a.isnan().all():
            assert error(a[1:-1], b[1:-1]) < 2 * TOLERANCE[dtype]


def test_programs_hang_on_the_heads_of_all_sequences_padded() -> None:
    triton = pytest.importorskip("triton")
    from nextn.kernels.delta_triton import FEW, program_of

    assert [program_of(1, heads) for heads in (1, 16)] == [FEW] * 2
    assert [program_of(batch, 32) for batch in (1, 2, 4)] == [(32, 2)] * 3
    assert [program_of(batch, 32) for batch in (8, 128)] == [(64, 2)] * 2
    for heads in (9, 10, 12, 16, 20, 24, 32, 48):
        for batch in range(1, 33):
            assert program_of(batch, heads) == program_of(triton.next_power_of_2(batch), heads)


@pytest.mark.parametrize("shape,batch", [((1, 16, 4, 64, 4), 8), real((16, 128, 32, 128, 4), 40)])
def test_padded_rows_have_the_same_bits_in_any_batch(shape: tuple[int, int, int, int, int], batch: int) -> None:
    """One sequence's rows alone, and among others that would fill the card."""
    pytest.importorskip("triton")
    from nextn.kernels import delta_triton

    w = weights_of(*shape, torch.bfloat16)
    rows = 2
    x = randn(batch * rows, sum(w.sizes), dtype=torch.bfloat16)
    many = torch.arange(batch, device=DEVICE)
    seen = []
    for slots in (many, many[3:4]):
        caches = Caches(w, batch, rows, torch.bfloat16, replay=True)
        for i, pool in enumerate(caches.all()):
            pool.copy_(randn(*pool.shape, seed=20 + i) * 0.1)
        mine = x.view(batch, rows, -1)[slots].flatten(0, 1)
        length, pending = torch.full_like(slots, 5), torch.full_like(slots, 2)
        pools = caches.ring, caches.states, caches.log
        out = delta_triton.delta_replay(w, mine, *pools, slots, length, pending, pad_rows=4)
        seen.append((out.view(len(slots), rows, -1)[slots == 3], *(pool[3] for pool in caches.all())))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_replay_and_snapshots_agree_to_the_last_bit_with_one_padded_row_at_a_time() -> None:
    pytest.importorskip("triton")
    from nextn.kernels import delta_triton

    w = weights_of(1, 16, 2, 16, 4, torch.float32)
    rows = 4
    snaps, replay = Caches(w, 1, rows, torch.float32, replay=False), Caches(w, 1, rows, torch.float32, replay=True)
    single = Caches(w, 1, 1, torch.float32, replay=False)
    for caches in (snaps, replay, single):
        caches.states.zero_()
    slot = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    zero = slot.clone()
    x = randn(8, sum(w.sizes))
    alone = [
        delta_triton.delta_snapshots(w, x[i : i + 1], single.ring, single.states, slot, slot + i, zero, pad_rows=rows)
        for i in range(8)
    ]
    # Row 3 of the first round is thrown away and comes again in the second.
    first = torch.cat((x[:3], randn(1, sum(w.sizes), seed=9)))
    for caches, run in ((snaps, delta_triton.delta_snapshots), (replay, delta_triton.delta_replay)):
        extra = () if caches is snaps else (caches.log,)
        chosen = zero + 2 if caches is snaps else zero + 3
        a = run(w, first, caches.ring, caches.states, *extra, slot, zero, zero)
        b = run(w, x[3:7], caches.ring, caches.states, *extra, slot, zero + 3, chosen)
        assert torch.equal(torch.cat((a[:3], b)), torch.cat(alone[:7]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "k_heads,k_dim,v_heads,v_dim,kernel,rows",
    [(*SMALL, 1), (*SMALL, 21), (1, 8, 3, 16, 2, 3), (2, 16, 2, 8, 3, 17), real(16, 128, 32, 128, 4, 700)],
)
def test_a_prompts_inputs_are_convolved(
    k_heads: int, k_dim: int, v_heads: int, v_dim: int, kernel: int, rows: int, dtype: torch.dtype
) -> None:
    """At a sequence's beginning, near it, and in its middle; the ring is only read."""
    from nextn.kernels import delta_inputs_triton

    w = weights_of(k_heads, k_dim, v_heads, v_dim, kernel, dtype)
    channels = w.sizes[0]
    ring = poison(6, kernel + 3, channels, dtype=dtype)
    slot, position = torch.tensor([4, 1, 2], device=DEVICE), torch.tensor([0, 1, 30], device=DEVICE)
    for b in range(3):
        for p in range(max(int(position[b]) - kernel + 1, 0), int(position[b])):
            ring[slot[b], p % (kernel + 3)] = randn(channels, dtype=dtype, seed=p)
    x = randn(3 * rows, sum(w.sizes), dtype=dtype)
    kept = ring.clone()
    got = delta_inputs_triton.delta_inputs(w, x, ring, slot, position)
    assert torch.equal(ring.nan_to_num(7.0), kept.nan_to_num(7.0))
    exact = replace(w, conv=w.conv.float())
    expected = delta.delta_inputs(exact, x.float(), ring.float(), slot, position)
    for name, a, b in zip("qkvgb", got, expected, strict=True):
        assert a.shape == b.shape, name
        assert error(a, b) < TOLERANCE[a.dtype], name
    assert [t.dtype for t in got] == [dtype] * 3 + [torch.float32] * 2
