"""Gated delta rule (Yang et al., "Gated Delta Networks", 2024) and the short convolution before it.

A head's state S [k_dim, v_dim] follows, with decay a_t = exp(g_t) and write strength b_t:

    u_t = b_t (v_t - a_t S_{t-1}^T k_t)        S_t = a_t S_{t-1} + k_t u_t^T        o_t = S_t^T q_t

Unrolled over rows with G_t = g_1 + .. + g_t, the u_t solve a unit lower triangular system, so that neither a chunk
of a prompt nor the few rows of a verify need a loop over rows:

    u_t + b_t sum_{j<t} exp(G_t - G_j) (k_t . k_j) u_j = b_t (v_t - exp(G_t) S_0^T k_t)

q and k are normalised per head (l2, eps 1e-6 inside the root) and q is scaled by k_dim ** -0.5, as in transformers'
``modeling_qwen3_5.py``. States are float32, or float64 where the inputs are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nextn.kernels.norm import wide


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def decay_and_strength(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), for a, b [..., v_heads]; at least float32."""
    return -a_log.exp() * F.softplus(wide(a) + dt_bias), torch.sigmoid(wide(b))


def causal_conv(window: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution with silu.

    Args:
        window: [batch, kernel - 1 + rows, channels]; the columns before the first row come first.
        weight: [channels, kernel].
    Returns:
        [batch, rows, channels].
    """
    kernel = weight.shape[1]
    rows = window.shape[1] - kernel + 1
    if rows <= 16:
        return F.silu((window.unfold(1, kernel, 1) * weight).sum(-1))
    out = F.conv1d(window.transpose(1, 2), weight[:, None], groups=weight.shape[0])
    return F.silu(out.transpose(1, 2))


def _heads_first(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalise, scale, share key heads among value heads, and put heads before rows: [batch, heads, rows, ...]."""
    group = v.shape[2] // k.shape[2]
    q = l2_normalise(wide(q)) * k.shape[-1] ** -0.5
    k = l2_normalise(wide(k))
    if group > 1:
        q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    return q.transpose(1, 2), k.transpose(1, 2), wide(v).transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2)


def gdn_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A few rows, with the state after each of them.

    Args:
        q, k: [batch, rows, k_heads, k_dim]; v: [batch, rows, v_heads, v_dim]; g, beta: [batch, rows, v_heads].
        state: [batch, v_heads, k_dim, v_dim] before the first row.
    Returns:
        (out [batch, rows, v_heads, v_dim] in v's dtype, states [batch, rows, v_heads, k_dim, v_dim]).
    """
    rows, dtype = q.shape[1], v.dtype
    q, k, v, g, beta = _heads_first(q, k, v, g, beta)
    if rows == 1:
        decayed = state * g.exp()[..., None]
        update = beta[..., None] * (v - k @ decayed)
        after = torch.addcmul(decayed, k.transpose(-1, -2), update)
        return (q @ after).transpose(1, 2).to(dtype), after[:, None]
    total = g.cumsum(-1)
    weights = (total[..., :, None] - total[..., None, :]).exp().tril()
    grown = total.exp()[..., None]
    system = (k @ k.transpose(-1, -2)) * weights * beta[..., None]
    right = beta[..., None] * (v - (k @ state) * grown)
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    keys = weights[..., None, :] * k.transpose(-1, -2)[:, :, None]
    states = torch.addcmul(keys @ u[:, :, None], state[:, :, None], grown[..., None])
    out = (q[..., None, :] @ states)[..., 0, :]
    return out.transpose(1, 2).to(dtype), states.transpose(1, 2)


def gdn_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """Many rows, chunk by chunk; differentiable.

    Args:
        q, k, v, g, beta: as in `gdn_step`; state may be None for zeros.
    Returns:
        (out [batch, rows, v_heads, v_dim] in v's dtype, final state [batch, v_heads, k_dim, v_dim]).
    """
    rows, dtype = q.shape[1], v.dtype
    q, k, v, g, beta = _heads_first(q, k, v, g, beta)
    batch, heads, _, v_dim = v.shape
    if state is None:
        state = v.new_zeros(batch, heads, k.shape[-1], v_dim)
    chunk = min(chunk, rows)
    pad = -rows % chunk
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
    q, k, v = (x.reshape(batch, heads, -1, chunk, x.shape[-1]) for x in (q, k, v))
    g, beta = g.reshape(batch, heads, -1, chunk), beta.reshape(batch, heads, -1, chunk, 1)
    total = g.cumsum(-1)
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    weights = (total[..., :, None] - total[..., None, :]).masked_fill(above, float("-inf")).exp()
    grown = total.exp()[..., None]
    system = (k @ k.transpose(-1, -2)) * weights * beta
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v * beta, k * beta * grown), -1), upper=False, unitriangular=True
    )
    own, carried = solved.split((v_dim, k.shape[-1]), -1)
    inside = (q @ k.transpose(-1, -2)) * weights
    grown_q = q * grown
    rest = (total[..., -1:] - total).exp()[..., None] * k
    last = total[..., -1].exp()[..., None, None]
    outs = []
    for c in range(q.shape[2]):
        u = own[:, :, c] - carried[:, :, c] @ state
        outs.append(grown_q[:, :, c] @ state + inside[:, :, c] @ u)
        state = state * last[:, :, c] + rest[:, :, c].transpose(-1, -2) @ u
    out = torch.cat(outs, 2)[:, :, :rows]
    return out.transpose(1, 2).to(dtype), state
