"""How the rows of a forward see each other and the past. A model is handed one; it never fetches a cache itself.

The modules compute projections; everything that looks across rows (attention, the delta net's recurrence and its
convolution) goes through a `Context`. `SequenceContext` here has no past: whole sequences, as in training. The
engine's contexts read and write caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from nextn.kernels import attention, gdn
from nextn.kernels.rope import Rope, qk_norm_rope


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Scales of the norms on query and key heads; None where the family has none."""

    q: Tensor | None
    k: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class DeltaInput:
    """A delta net's projections for [batch, rows]: mixed [.., 2 k + v channels], a and b [.., v_heads], its weights."""

    mixed: Tensor
    a: Tensor
    b: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The convolved channels as q, k [batch, rows, k_heads, k_dim] and v [batch, rows, v_heads, v_dim]."""
        batch, rows, _ = mixed.shape
        k = self.k_heads * self.k_dim
        parts = mixed.split((k, k, self.v_heads * self.v_dim), -1)
        return (
            parts[0].view(batch, rows, self.k_heads, self.k_dim),
            parts[1].view(batch, rows, self.k_heads, self.k_dim),
            parts[2].view(batch, rows, self.v_heads, self.v_dim),
        )


class Context(Protocol):
    """What a forward is handed."""

    @property
    def positions(self) -> Tensor:
        """[batch, rows] int64."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: QKNorm, rope: Rope) -> Tensor:
        """Attention of full-attention layer `layer` (counted among those): raw projections
        [batch, rows, heads or kv_heads, head_dim] in, [batch, rows, heads, head_dim] out."""
        ...

    def delta(self, layer: int, x: DeltaInput) -> Tensor:
        """Convolution and recurrence of delta-net layer `layer` (counted among those) ->
        [batch, rows, v_heads, v_dim]."""
        ...


class SequenceContext:
    """Whole sequences without a past: row i of a sequence sees rows 0..i.

    Args:
        positions: [batch, rows] int64.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: QKNorm, rope: Rope) -> Tensor:
        q, k = qk_norm_rope(q, k, norms.q, norms.k, norms.eps, rope)
        return attention.causal_attention(q, k, v, q.shape[-1] ** -0.5)

    def delta(self, layer: int, x: DeltaInput) -> Tensor:
        window = F.pad(x.mixed, (0, 0, x.conv.shape[1] - 1, 0))
        q, k, v = x.split(gdn.causal_conv(window, x.conv))
        g, beta = gdn.decay_and_strength(x.a, x.b, x.a_log, x.dt_bias)
        out, _ = gdn.gdn_chunk(q, k, v, g, beta, None)
        return out
