"""The head's forward equals an independent float64 computation from the checkpoint's own tensors, in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from nextn.checkpoint.source import open_checkpoint
from nextn.models.context import SequenceContext
from nextn.models.load import load_decoder
from tests.oracle.checkpoints import KINDS, make_checkpoint

Array = NDArray[np.float64]


def norm(x: Array, w: Array, one_plus: bool) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (w + 1 if one_plus else w)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    g = x @ gate.T
    return (g * sigmoid(g) * (x @ up.T)) @ down.T


def turn(x: Array, position: int, theta: float, width: int) -> Array:
    """Rotate pairs (i, i + width/2) by position * theta^(-2i/width)."""
    out, half = x.copy(), width // 2
    for i in range(half):
        angle = position / theta ** (2 * i / width)
        a, b = x[..., i], x[..., i + half]
        out[..., i] = a * np.cos(angle) - b * np.sin(angle)
        out[..., i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def head(w: dict[str, Array], config: dict[str, Any], embedding: Array, hidden: Array) -> Array:
    """Rows [rows, hidden] of the ``mtp.`` head, position by position."""
    text = config.get("text_config") or config
    hybrid = "qwen3_next" in text["model_type"] or "qwen3_5" in text["model_type"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    dim = text.get("head_dim") or text["hidden_size"] // heads
    rope = text.get("rope_parameters") or {}
    width = int(dim * rope.get("partial_rotary_factor", 0.25 if hybrid else 1.0))
    theta = rope.get("rope_theta", 10000.0)
    p = "mtp.layers.0."
    both = np.concatenate(
        [
            norm(embedding, w["mtp.pre_fc_norm_embedding.weight"], hybrid),
            norm(hidden, w["mtp.pre_fc_norm_hidden.weight"], hybrid),
        ],
        -1,
    )
    stream = both @ w["mtp.fc.weight"].T
    x = norm(stream, w[p + "input_layernorm.weight"], hybrid)
    zero = np.zeros(())
    q, k, v = (x @ w[p + f"self_attn.{n}_proj.weight"].T + w.get(p + f"self_attn.{n}_proj.bias", zero) for n in "qkv")
    rows = len(x)
    gate = None
    q = q.reshape(rows, heads, -1)
    if hybrid:
        q, gate = q[..., :dim], q[..., dim:]
    k, v = k.reshape(rows, kv_heads, dim), v.reshape(rows, kv_heads, dim)
    if p + "self_attn.q_norm.weight" in w:
        q = norm(q, w[p + "self_attn.q_norm.weight"], hybrid)
        k = norm(k, w[p + "self_attn.k_norm.weight"], hybrid)
    q = np.stack([turn(q[i], i, theta, width) for i in range(rows)])
    k = np.stack([turn(k[i], i, theta, width) for i in range(rows)])
    out = np.zeros((rows, heads, dim))
    for i in range(rows):
        for h in range(heads):
            scores = k[: i + 1, h // (heads // kv_heads)] @ q[i, h] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights / weights.sum() @ v[: i + 1, h // (heads // kv_heads)]
    if gate is not None:
        out = out * sigmoid(gate)
    stream = stream + out.reshape(rows, -1) @ w[p + "self_attn.o_proj.weight"].T
    x = norm(stream, w[p + "post_attention_layernorm.weight"], hybrid)
    if p + "mlp.gate.weight" in w:
        logits = x @ w[p + "mlp.gate.weight"].T
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        y = sigmoid(x @ w[p + "mlp.shared_expert_gate.weight"].T) * swiglu(
            x, *(w[p + f"mlp.shared_expert.{n}_proj.weight"] for n in ("gate", "up", "down"))
        )
        for i in range(rows):
            best = np.argsort(-probs[i])[: text["num_experts_per_tok"]]
            for e in best:
                parts = (w[p + f"mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down"))
                y[i] += probs[i, e] / probs[i, best].sum() * swiglu(x[i : i + 1], *parts)[0]
    else:
        y = swiglu(x, *(w[p + f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))
    return norm(stream + y, w["mtp.norm.weight"], hybrid)


@pytest.mark.parametrize("kind", KINDS)
def test_head_forward(tmp_path: Path, kind: str) -> None:
    folder = make_checkpoint(tmp_path, kind)
    config = json.loads((folder / "config.json").read_text())
    weights = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
    model, _ = load_decoder(open_checkpoint(folder), dtype=torch.float64, device=torch.device("cpu"))
    ids = torch.randint(0, 97, (1, 11), generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(1, 11, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, recycled = model.head_forward(ids, hidden, SequenceContext(torch.arange(11)[None]))
    expected = head(weights, config, model.embed.weight.numpy()[ids[0]], hidden[0].numpy())
    assert np.abs(ours[0].numpy() - expected).max() / np.abs(expected).max() < 1e-6
    assert torch.equal(ours, recycled)
