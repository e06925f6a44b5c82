"""Contexts over the cache: how the rows of a decoding or prefill forward see what came before them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from nextn.engine.cache import Cache
from nextn.kernels import attention, gdn
from nextn.kernels.delta import replay_step
from nextn.kernels.gdn_fused import Bounds, available, gdn_chunk_fused
from nextn.kernels.rope import Rope, qk_norm_rope
from nextn.models.context import DeltaInput, QKNorm


class Rows:
    """Where the rows of one forward stand; shared by the target's context and the head's.

    Args:
        cache: the pools.
        table: [batch, n] page ids.
        positions: [batch, rows] int64, consecutive in each sequence.
        bound: keys to look at, at least the largest position + 1.
        slots: [batch] sequence slots.
        committed: [batch] int64, rows of the last decoding forward that were kept; 0 after a prefill.
        starts: makes it a prefill, many rows of which only the last one's state is kept: each sequence's first
            position, known to the host.

    Attributes:
        settled: [batch], positions of each sequence whose keys and values earlier rounds or a prefill stored, not
            kernels that may still run; None where that is not known.
    """

    settled: Tensor | None = None

    def __init__(
        self,
        cache: Cache,
        table: Tensor,
        positions: Tensor,
        bound: int,
        slots: Tensor,
        committed: Tensor,
        *,
        starts: Sequence[int] | None = None,
    ) -> None:
        self.cache, self.table, self.positions, self.bound = cache, table, positions, bound
        self.slots, self.committed, self.starts = slots, committed, starts

    @property
    def prefill(self) -> bool:
        return self.starts is not None

    @cached_property
    def bounds(self) -> Bounds:
        """Where the sequences begin when their rows are laid end to end."""
        batch, rows = self.positions.shape
        return Bounds([rows * i for i in range(batch + 1)], self.positions.device)

    @cached_property
    def kv_slots(self) -> Tensor:
        return attention.slots_of(self.table, self.positions, self.cache.page_size)

    @cached_property
    def first(self) -> Tensor:
        """[batch], position of each sequence's first row."""
        return self.positions[:, 0].contiguous()

    @cached_property
    def select(self) -> Tensor:
        """[batch], the snapshot to start from; a prefill leaves the first."""
        return (self.committed - 1).clamp(min=0)

    @cached_property
    def start_state(self) -> Tensor:
        """Flat index [batch] of the snapshot to start from."""
        return self.slots * self.cache.rows + self.select

    @cached_property
    def past_columns(self) -> tuple[Tensor, Tensor]:
        """The convolution's inputs before the first row: flat ring columns [batch * (kernel - 1)], and whether each
        lies before the sequence [batch, kernel - 1, 1], where inputs are 0."""
        positions = self.positions[:, :1] + torch.arange(1 - self.cache.kernel, 0, device=self.positions.device)
        return self._columns(positions), (positions < 0)[..., None]

    @cached_property
    def row_columns(self) -> Tensor:
        """Flat ring columns of the rows themselves, the last ones where there are more rows than columns."""
        return self._columns(self.positions[:, -self.cache.columns :])

    def _columns(self, positions: Tensor) -> Tensor:
        return (self.slots[:, None] * self.cache.columns + positions % self.cache.columns).view(-1)


class TargetContext:
    """The target's keys, values and recurrent state."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.positions = rows.positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: QKNorm, rope: Rope) -> Tensor:
        cache = self.rows.cache
        return _attend(self.rows, cache.k[layer], cache.v[layer], q, k, v, norms, rope)

    def delta(self, layer: int, x: DeltaInput) -> Tensor:
        """Starts from what `committed` selects; leaves a snapshot or log entry a row (a prefill: its last state)."""
        where, cache = self.rows, self.rows.cache
        batch, rows, channels = x.mixed.shape
        ring, states = cache.conv[layer].view(-1, channels), cache.states[layer]
        columns, before_start = where.past_columns
        past = ring.index_select(0, columns).view(batch, -1, channels).masked_fill(before_start, 0)
        q, k, v = x.split(gdn.causal_conv(torch.cat((past, x.mixed), 1), x.conv))
        keep_inputs(where, layer, x.mixed)
        g, beta = gdn.decay_and_strength(x.a, x.b, x.a_log, x.dt_bias)
        if where.prefill:
            return prefill_delta(where, states, q, k, v, g, beta)
        if cache.replay:
            return replay_step(q, k, v, g, beta, states, cache.logs[layer], where.slots, where.first, where.committed)
        state = states.view(-1, *states.shape[2:]).index_select(0, where.start_state)
        out, after = gdn.gdn_step(q, k, v, g, beta, state)
        states[where.slots, :rows] = after
        return out


class DraftContext:
    """The head's own keys and values; a head has no recurrent layers. Never touches the target's pools."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.positions = rows.positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: QKNorm, rope: Rope) -> Tensor:
        cache = self.rows.cache
        return _attend(self.rows, cache.draft_k[layer], cache.draft_v[layer], q, k, v, norms, rope)

    def delta(self, layer: int, x: DeltaInput) -> Tensor:
        raise AssertionError("an MTP head has no delta-net layers")


def keep_inputs(where: Rows, layer: int, mixed: Tensor) -> None:
    """Put the rows' inputs of the convolution [batch, rows, channels] into the ring, as many as it has room for."""
    cache = where.cache
    last = mixed[:, -cache.columns :].reshape(-1, mixed.shape[-1])
    cache.conv[layer].view(-1, mixed.shape[-1]).index_copy_(0, where.row_columns, last)


def prefill_delta(where: Rows, states: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence over a prompt's rows, from the state that `where` selects to the one that it leaves.

    Args:
        states: one layer's of the cache; the last row's state becomes snapshot 0, or the state in replay.
        q, k, v, g, beta: as in `gdn.gdn_chunk`.
    """
    snapshots = states if where.cache.replay else states.view(-1, *states.shape[2:])
    state = snapshots[where.slots if where.cache.replay else where.start_state]
    if available(v):
        q1, k1, v1, g1, beta1 = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v, g, beta))
        out, last = gdn_chunk_fused(q1, k1, v1, g1, beta1, state, where.bounds)
        assert last is not None
    else:
        out, last = gdn.gdn_chunk(q, k, v, g, beta, state)
    snapshots[where.slots if where.cache.replay else where.slots * where.cache.rows] = last
    return out.view(v.shape)


def _attend(
    rows: Rows, k_pool: Tensor, v_pool: Tensor, q: Tensor, k: Tensor, v: Tensor, norms: QKNorm, rope: Rope
) -> Tensor:
    q, k = qk_norm_rope(q, k, norms.q, norms.k, norms.eps, rope)
    attention.write_kv(k, v, k_pool, v_pool, rows.kv_slots)
    if rows.starts is not None and q.is_cuda:
        return attention.prefill_attention(q, k_pool, v_pool, rows.table, rows.starts, q.shape[-1] ** -0.5)
    return attention.paged_attention(q, k_pool, v_pool, rows.table, rows.positions, rows.bound, q.shape[-1] ** -0.5)
