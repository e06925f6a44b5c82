"""Heads in float64 numpy, written from the papers and the families' contract, apart from any engine and from nextn.

One sequence; rows attend causally. Returns logits [rows, vocab].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Weights = Mapping[str, Array]


def rms(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm (Zhang and Sennrich 2019)."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotate(x: Array, positions: Array, theta: float, width: int) -> Array:
    """Rotary embedding of the first `width` channels in halves (Su et al. 2021). x [rows, heads, head_dim]."""
    half = width // 2
    angle = positions[:, None] * theta ** (-2 * np.arange(half) / width)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:width]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., width:]], -1)


def attend(q: Array, k: Array, v: Array) -> Array:
    """Causal softmax attention with shared key heads. [rows, heads, d] -> [rows, heads*d]."""
    rows, heads, d = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], 1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d)
    scores[:, np.triu(np.ones((rows, rows), bool), 1)] = -np.inf
    out: Array = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(rows, -1)
    return out


def qwen_head(
    w: Weights, config: Mapping[str, Any], embed: Array, output: Array, ids: Any, hidden: Array, positions: Array
) -> Array:
    """Qwen3-Next and Qwen3.5: gated attention with head norms, dense or sparse MLP, norm weights stored around 0."""
    text = config.get("text_config", config)
    eps, head_dim = text["rms_norm_eps"], text["head_dim"]
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    rope = text["rope_parameters"]
    width = int(head_dim * rope["partial_rotary_factor"])
    at = "mtp.layers.0"

    def norm(x: Array, key: str) -> Array:
        return rms(x, 1 + w[key], eps)

    e = norm(embed[ids], "mtp.pre_fc_norm_embedding.weight")
    h = norm(hidden, "mtp.pre_fc_norm_hidden.weight")
    x = np.concatenate([e, h], -1) @ w["mtp.fc.weight"].T
    y = norm(x, f"{at}.input_layernorm.weight")
    q = (y @ w[f"{at}.self_attn.q_proj.weight"].T).reshape(len(ids), heads, 2, head_dim)
    q, gate = q[:, :, 0], q[:, :, 1].reshape(len(ids), -1)
    k, v = ((y @ w[f"{at}.self_attn.{p}_proj.weight"].T).reshape(len(ids), kv, head_dim) for p in "kv")
    q = rotate(norm(q, f"{at}.self_attn.q_norm.weight"), positions, rope["rope_theta"], width)
    k = rotate(norm(k, f"{at}.self_attn.k_norm.weight"), positions, rope["rope_theta"], width)
    x = x + (attend(q, k, v) * sigmoid(gate)) @ w[f"{at}.self_attn.o_proj.weight"].T
    y = norm(x, f"{at}.post_attention_layernorm.weight")
    x = x + (_moe(w, text, y, f"{at}.mlp") if "num_experts" in text else _mlp(w, y, f"{at}.mlp"))
    return norm(x, "mtp.norm.weight") @ output.T


def _mlp(w: Weights, x: Array, at: str) -> Array:
    inner = silu(x @ w[f"{at}.gate_proj.weight"].T) * (x @ w[f"{at}.up_proj.weight"].T)
    out: Array = inner @ w[f"{at}.down_proj.weight"].T
    return out


def _moe(w: Weights, text: Mapping[str, Any], x: Array, at: str) -> Array:
    """The k most probable experts, their probabilities made to sum to 1, and a shared one with a gate of its own."""
    law = softmax(x @ w[f"{at}.gate.weight"].T)
    out = np.zeros_like(x)
    for row in range(len(x)):
        best = np.argsort(-law[row])[: text["num_experts_per_tok"]]
        for expert in best:
            share = law[row, expert] / law[row, best].sum()
            out[row] += share * _mlp(w, x[row : row + 1], f"{at}.experts.{expert}")[0]
    gate = sigmoid(x @ w[f"{at}.shared_expert_gate.weight"].T)
    return out + gate * _mlp(w, x, f"{at}.shared_expert")


def mimo_head(
    w: Weights, config: Mapping[str, Any], embed: Array, output: Array, ids: Any, hidden: Array, positions: Array
) -> Array:
    """MiMo: hidden first in the fusion, the embedding blanked at position 0, Qwen2's layer with biases on q, k, v."""
    eps, heads, kv = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["head_dim"]
    at = "model.mtp_layers.0"
    e = np.where((positions == 0)[:, None], 0, embed[ids])
    h = rms(hidden, w[f"{at}.hidden_layernorm.weight"], eps)
    e = rms(e, w[f"{at}.token_layernorm.weight"], eps)
    x = np.concatenate([h, e], -1) @ w[f"{at}.input_proj.weight"].T
    y = rms(x, w[f"{at}.input_layernorm.weight"], eps)

    def project(p: str, count: int) -> Array:
        z = y @ w[f"{at}.self_attn.{p}_proj.weight"].T + w[f"{at}.self_attn.{p}_proj.bias"]
        return z.reshape(len(ids), count, head_dim)

    theta = config["rope_theta"]
    q, k = rotate(project("q", heads), positions, theta, head_dim), rotate(project("k", kv), positions, theta, head_dim)
    x = x + attend(q, k, project("v", kv)) @ w[f"{at}.self_attn.o_proj.weight"].T
    y = rms(x, w[f"{at}.post_attention_layernorm.weight"], eps)
    x = x + _mlp(w, y, f"{at}.mlp")
    return rms(x, w[f"{at}.final_layernorm.weight"], eps) @ output.T
