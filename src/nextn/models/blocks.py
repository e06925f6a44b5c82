"""The parts of a decoder layer: norm, linear, gated attention, gated delta net, MLP, mixture of experts.

Projections that read the same input are one matrix (q, k, v; the delta net's q, k, v, z, b, a; gate and up): fewer
and larger products. `Linear.parts` says which rows belong to which checkpoint tensor, for loading and saving.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nextn.kernels.activation import sigmoid_mul, silu_mul
from nextn.kernels.linear import linear
from nextn.kernels.norm import add_rms_norm, gated_rms_norm, rms_norm
from nextn.kernels.rope import Rope
from nextn.models.config import DecoderConfig
from nextn.models.context import Context, DeltaInput, QKNorm


class Linear(nn.Module):
    """x @ weight.T (+ bias), with several checkpoint tensors stacked along the outputs.

    Args:
        inputs: width of x.
        parts: canonical name of each stacked tensor -> its rows.
        bias: whether there is one.
    """

    def __init__(self, inputs: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.sizes = tuple(parts.values())
        self.weight = nn.Parameter(torch.empty(sum(self.sizes), inputs))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm; `one_plus` weights are stored around zero and applied as 1 + w.

    The weight is kept in at least float32, whatever the model's dtype.
    """

    def __init__(self, width: int, eps: float, one_plus: bool) -> None:
        super().__init__()
        self.eps = eps
        self.one_plus = one_plus
        self.weight = nn.Parameter(torch.empty(width))
        self._scale: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """What the normed values are multiplied with: w, or 1 + w (kept while the weight is frozen)."""
        if not self.one_plus:
            return self.weight
        if self.weight.requires_grad:
            return 1 + self.weight
        if self._scale is None or self._scale.device != self.weight.device or self._scale.dtype != self.weight.dtype:
            # Kept for all later uses, so not an inference tensor, which autograd would refuse.
            with torch.inference_mode(False):
                self._scale = 1 + self.weight
        return self._scale

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        return add_rms_norm(x, residual, self.scale, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with optional head norms, biases and output gate.

    Where q carries a gate, the rows of each head are [query, gate] (Qwen3-Next, Qwen3.5).
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim, self.gated = c.heads, c.kv_heads, c.head_dim, c.q_gate == 2
        self.qkv = Linear(
            c.hidden,
            {"q": c.heads * c.head_dim * c.q_gate, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim},
            c.qkv_bias,
        )
        self.o = Linear(c.heads * c.head_dim, {"o": c.hidden}, c.o_bias)
        self.eps = c.eps
        self.q_norm = RMSNorm(c.head_dim, c.eps, c.one_plus) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.eps, c.one_plus) if c.qk_norm else None

    def forward(self, x: Tensor, rope: Rope, context: Context) -> Tensor:
        """x [batch, rows, hidden] -> [batch, rows, hidden]."""
        batch, rows, _ = x.shape
        q, k, v = self.qkv(x).split(self.qkv.sizes, -1)
        gate = None
        if self.gated:
            q, gate = q.view(batch, rows, self.heads, 2 * self.head_dim).chunk(2, -1)
        norms = QKNorm(
            self.q_norm.scale if self.q_norm is not None else None,
            self.k_norm.scale if self.k_norm is not None else None,
            self.eps,
        )
        out = context.attend(
            self.layer,
            q.view(batch, rows, self.heads, self.head_dim),
            k.view(batch, rows, self.kv_heads, self.head_dim),
            v.view(batch, rows, self.kv_heads, self.head_dim),
            norms,
            rope,
        )
        if gate is not None:
            out = sigmoid_mul(out, gate)
        return self.o(out.reshape(batch, rows, -1))


class GatedDeltaNet(nn.Module):
    """Gated delta net: one input product, short convolution, recurrence, gated norm, output product."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.layer = layer
        self.k_heads, self.v_heads, self.k_dim, self.v_dim = c.gdn_k_heads, c.gdn_v_heads, c.gdn_k_dim, c.gdn_v_dim
        k, v = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        self.inputs = Linear(c.hidden, {"in_qkv": 2 * k + v, "in_z": v, "in_b": self.v_heads, "in_a": self.v_heads})
        self.conv = nn.Parameter(torch.empty(2 * k + v, c.conv))
        self.dt_bias = nn.Parameter(torch.empty(self.v_heads))
        self.a_log = nn.Parameter(torch.empty(self.v_heads))
        self.norm = RMSNorm(self.v_dim, c.eps, one_plus=False)
        self.out = Linear(v, {"out": c.hidden})

    def forward(self, x: Tensor, rope: Rope, context: Context) -> Tensor:
        """x [batch, rows, hidden] -> [batch, rows, hidden]."""
        batch, rows, _ = x.shape
        mixed, z, b, a = self.inputs(x).split(self.inputs.sizes, -1)
        out = context.delta(
            self.layer,
            DeltaInput(
                mixed, a, b, self.conv, self.a_log, self.dt_bias, self.k_heads, self.k_dim, self.v_heads, self.v_dim
            ),
        )
        gate = z.view(batch, rows, self.v_heads, self.v_dim)
        return self.out(gated_rms_norm(out, gate, self.norm.scale, self.norm.eps).reshape(batch, rows, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, {"gate": inter, "up": inter})
        self.down = Linear(inter, {"down": hidden})

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))


class MoE(nn.Module):
    """Softmax router over all experts, the best k renormalised, and a shared expert behind a sigmoid gate.

    transformers ``Qwen3_5MoeSparseMoeBlock``; experts are stacked [experts, ...] whatever the checkpoint does.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c = config
        self.k, self.norm_topk = c.experts_per_token, c.norm_topk
        self.router = Linear(c.hidden, {"router": c.experts})
        self.gate_up = nn.Parameter(torch.empty(c.experts, 2 * c.moe_inter, c.hidden))
        self.down = nn.Parameter(torch.empty(c.experts, c.hidden, c.moe_inter))
        self.shared = MLP(c.hidden, c.shared_inter) if c.shared_inter else None
        self.shared_gate = Linear(c.hidden, {"shared_gate": 1}) if c.shared_inter else None

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, rows, hidden] -> same."""
        flat = x.reshape(-1, x.shape[-1])
        logits = self.router(flat)
        probs = logits.softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
        weights, chosen = probs.topk(self.k, -1)
        if self.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(flat)
        for expert in chosen.unique().tolist():
            row, rank = torch.where(chosen == expert)
            h = linear(silu_mul(linear(flat[row], self.gate_up[expert])), self.down[expert])
            out = out.index_add(0, row, h * weights[row, rank, None])
        if self.shared is not None and self.shared_gate is not None:
            out = out + torch.sigmoid(self.shared_gate(flat)) * self.shared(flat)
        return out.view_as(x)
