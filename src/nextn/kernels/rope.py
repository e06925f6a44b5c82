"""Rotary position embedding in the half-split form, whole or partial (Su et al., 2021; transformers rotate_half)."""

from __future__ import annotations

import torch
from torch import Tensor

from nextn.kernels.norm import rms_norm

Rope = tuple[Tensor, Tensor]
"""(cos, sin), each [batch, rows, 1, rotary_dim / 2]."""


def rope_tables(positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> Rope:
    """cos and sin for integer positions [batch, rows]; inv_freq [rotary_dim / 2].

    Angles are computed in float32, or float64 where the model runs in float64.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions[..., None, None].to(work) * inv_freq.to(work)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the first rotary_dim channels of x [batch, rows, heads, head_dim]; the rest passes through."""
    cos, sin = rope
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        turned.append(x[..., 2 * half :])
    return torch.cat(turned, -1)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_scale: Tensor | None, k_scale: Tensor | None, eps: float, rope: Rope
) -> tuple[Tensor, Tensor]:
    """Norm each head of q, k [batch, rows, heads or kv_heads, head_dim] where scales are given, then rotate."""
    if q_scale is not None and k_scale is not None:
        q, k = rms_norm(q, q_scale, eps), rms_norm(k, k_scale, eps)
    return apply_rope(q, rope), apply_rope(k, rope)
