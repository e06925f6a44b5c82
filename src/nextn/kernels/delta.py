"""A delta-net layer's step on its caches: convolution, recurrence and gated norm of a few rows, in plain PyTorch.

The caches are indexed by position, so that neither acceptance nor a new sequence moves or clears anything:

- **Inputs of the convolution**, a ring [slots, columns, channels]: position p lies in column p % columns. A step of R
  rows reads kernel - 1 columns and writes R others, so it needs columns >= kernel - 1 + R. Positions below 0 read as 0.
- **Recurrent state**, one of two ways. *Snapshots* [slots, K + 1, v_heads, k_dim, v_dim]: row i's state is written to
  snapshot i, and the next step starts from the one selected. *Replay*: one state [slots, v_heads, k_dim, v_dim], and
  a log ring of what each row did to it (its key, its update, its decay). The next step first applies the rows that
  were accepted. It moves the state once each way, where snapshots write it once a row, and keeps one state, not K + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.kernels.gdn import causal_conv, decay_and_strength, gdn_step, l2_normalise
from nextn.kernels.norm import gated_rms_norm, wide
from nextn.kernels.support import whole


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A layer's weights besides its two products.

    Attributes:
        conv: [channels, kernel], channels = 2 * k_heads * k_dim + v_heads * v_dim in the order q, k, v.
        a_log, dt_bias: [v_heads].
        scale: [v_dim], the output norm's.
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    scale: Tensor
    eps: float
    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Columns of the input product: q, k and v together; the gate z; b; a."""
        return self.conv.shape[0], self.v_heads * self.v_dim, self.v_heads, self.v_heads


@dataclass(frozen=True, slots=True)
class DeltaLog:
    """What rows did to the state, in rings by position; room for two steps' rows.

    Attributes:
        k: [slots, columns, k_heads, k_dim], normalised keys.
        u: [slots, columns, v_heads, v_dim], updates.
        g: [slots, columns, v_heads], log decays.
    """

    k: Tensor
    u: Tensor
    g: Tensor


def columns_of(start: Tensor, count: int, columns: int) -> Tensor:
    """Ring columns of positions start .. start + count - 1: [batch, count]."""
    return (start[:, None] + torch.arange(count, device=start.device)) % columns


def delta_snapshots(
    weights: DeltaWeights, x: Tensor, ring: Tensor, states: Tensor, slot: Tensor, position: Tensor, select: Tensor
) -> Tensor:
    """A step that starts from a snapshot and leaves one a row.

    Args:
        x: the input product [batch * rows, sum(weights.sizes)] or its partial sums.
        ring, states: caches of all slots; written in place.
        slot: [batch], each sequence's.
        position: [batch], of the first row.
        select: [batch], the snapshot to start from.
    Returns:
        [batch * rows, v_heads * v_dim], normed and gated, for the output product.
    """
    q, k, v, g, beta, gate = _inputs(weights, x, ring, slot, position)
    out, after = gdn_step(q, k, v, g, beta, states[slot, select])
    states[slot, : after.shape[1]] = after
    return gated_rms_norm(out, gate, weights.scale, weights.eps).reshape(x.shape[-2], -1)


def delta_replay(
    weights: DeltaWeights,
    x: Tensor,
    ring: Tensor,
    states: Tensor,
    log: DeltaLog,
    slot: Tensor,
    position: Tensor,
    pending: Tensor,
) -> Tensor:
    """A step that first applies the accepted rows of the last one to the state, then logs its own.

    Args:
        x, ring, slot, position: as in `delta_snapshots`.
        states: [slots, v_heads, k_dim, v_dim], the state before position - pending; brought up to `position`.
        log: read at positions position - pending .. position - 1, written at the rows' own.
        pending: [batch], rows to apply.
    Returns:
        [batch * rows, v_heads * v_dim], normed and gated, for the output product.
    """
    q, k, v, g, beta, gate = _inputs(weights, x, ring, slot, position)
    out = replay_step(q, k, v, g, beta, states, log, slot, position, pending)
    return gated_rms_norm(out, gate, weights.scale, weights.eps).reshape(x.shape[-2], -1)


def replay_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    log: DeltaLog,
    slot: Tensor,
    position: Tensor,
    pending: Tensor,
) -> Tensor:
    """The recurrence of `delta_replay`: q, k, v, g, beta as in `gdn_step` -> [batch, rows, v_heads, v_dim]."""
    group = v.shape[2] // k.shape[2]
    columns = log.k.shape[1]
    state = states[slot]
    for i in range(columns):
        at = slot, (position - pending + i) % columns
        keys = log.k[at].repeat_interleave(group, 1)
        grown = torch.addcmul(state * log.g[at].exp()[..., None, None], keys[..., :, None], log.u[at][..., None, :])
        state = torch.where((i < pending)[:, None, None, None], grown, state)
    states[slot] = state
    out, after = gdn_step(q, k, v, g, beta, state)
    key = l2_normalise(wide(k))
    before = torch.cat((state[:, None], after[:, :-1]), 1) * g.exp()[..., None, None]
    read = (key.repeat_interleave(group, 2)[..., None, :] @ before)[..., 0, :]
    to = slot[:, None], columns_of(position, g.shape[1], columns)
    log.k[to], log.u[to], log.g[to] = key, beta[..., None] * (wide(v) - read), g
    return out


def delta_inputs(
    weights: DeltaWeights, x: Tensor, ring: Tensor, slot: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (after the convolution), g and beta of the rows, [batch, rows, heads, ...]; reads the ring's past."""
    w = weights
    batch = slot.shape[0]
    mixed, _, b, a = whole(x, ring.dtype).view(batch, -1, sum(w.sizes)).split(w.sizes, -1)
    rows, past = mixed.shape[1], w.conv.shape[1] - 1
    before = ring[slot[:, None], columns_of(position - past, past, ring.shape[1])]
    known = position[:, None] - past + torch.arange(past, device=position.device) >= 0
    convolved = causal_conv(torch.cat((before.masked_fill(~known[..., None], 0), mixed), 1), w.conv)
    key_width = w.k_heads * w.k_dim
    q, k, v = convolved.split((key_width, key_width, w.v_heads * w.v_dim), -1)
    g, beta = decay_and_strength(a, b, w.a_log, w.dt_bias)
    key_shape, value_shape = (batch, rows, w.k_heads, w.k_dim), (batch, rows, w.v_heads, w.v_dim)
    return q.view(key_shape), k.view(key_shape), v.view(value_shape), g, beta


def _inputs(
    weights: DeltaWeights, x: Tensor, ring: Tensor, slot: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`delta_inputs` and the gate, [batch, rows, heads, ...]; the rows' inputs go into the ring."""
    w = weights
    found = delta_inputs(w, x, ring, slot, position)
    mixed, z, _, _ = whole(x, ring.dtype).view(slot.shape[0], -1, sum(w.sizes)).split(w.sizes, -1)
    ring[slot[:, None], columns_of(position, mixed.shape[1], ring.shape[1])] = mixed
    return *found, z.view(*mixed.shape[:2], w.v_heads, w.v_dim)
