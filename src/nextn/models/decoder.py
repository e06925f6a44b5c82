"""The decoder: embedding, layers, final norm, output head, and the MTP head as a submodule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nextn.kernels.linear import linear
from nextn.kernels.rope import Rope, rope_tables
from nextn.models.blocks import MLP, Attention, GatedDeltaNet, MoE, RMSNorm
from nextn.models.config import DecoderConfig
from nextn.models.context import Context
from nextn.models.mtp import MTPHead


class DecoderLayer(nn.Module):
    """Pre-norm layer: mixer (attention or delta net), then MLP or experts, each added to the residual stream.

    Args:
        config: the decoder.
        kind: ``full`` or ``linear``.
        layer: its number among the layers of its kind, which is how contexts count.
        sparse: mixture of experts instead of an MLP.
    """

    def __init__(self, config: DecoderConfig, kind: str, layer: int, sparse: bool) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden, config.eps, config.one_plus)
        self.post_norm = RMSNorm(config.hidden, config.eps, config.one_plus)
        self.attn: nn.Module | None = Attention(config, layer) if kind == "full" else None
        self.gdn: nn.Module | None = GatedDeltaNet(config, layer) if kind == "linear" else None
        self.moe: nn.Module | None = MoE(config) if sparse else None
        self.mlp: nn.Module | None = None if sparse else MLP(config.hidden, config.inter)

    def forward(self, x: Tensor, residual: Tensor | None, rope: Rope, context: Context) -> tuple[Tensor, Tensor]:
        """The last block's output and the stream before it -> the same after this layer; all [batch, rows, hidden]."""
        mixer = self.attn if self.attn is not None else self.gdn
        ffn = self.mlp if self.mlp is not None else self.moe
        assert mixer is not None
        assert ffn is not None
        x, residual = self.input_norm.add(x, residual)
        x = mixer(x, rope, context)
        x, residual = self.post_norm.add(x, residual)
        return ffn(x), residual


class Rotary(nn.Module):
    """Inverse frequencies of the rotary embedding. Types beyond ``default`` come from transformers' own formulas."""

    inv_freq: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        kind = config.rope["rope_type"]
        self.scaling = 1.0
        if kind == "default":
            steps = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device="cpu") / config.rotary_dim
            inv_freq = 1.0 / (float(config.rope["rope_theta"]) ** steps)
        else:
            inv_freq, self.scaling = _scaled_frequencies(config, kind)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """positions [batch, rows] -> (cos, sin)."""
        return rope_tables(positions, self.inv_freq, self.scaling, dtype)


def _scaled_frequencies(config: DecoderConfig, kind: str) -> tuple[Tensor, float]:
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields: dict[str, Any] = {
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": {**config.rope, "partial_rotary_factor": config.rotary_dim / config.head_dim},
    }
    stand_in = PretrainedConfig(**fields)
    with torch.device("cpu"):
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](stand_in, torch.device("cpu"))
    return inv_freq, float(scaling)


class Drafter(nn.Module):
    """What drafting needs: token embedding, output head and MTP head.

    A target is one itself and shares them; on its own it is a separately loaded draft model.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.head = None if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)
        self.rotary = Rotary(config)
        self.mtp = (
            MTPHead(config, lambda i: DecoderLayer(config, "full", i, config.head_sparse))
            if config.head_layers
            else None
        )

    @property
    def output_weight(self) -> Tensor:
        """[vocab, hidden]."""
        return self.embed.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Output head over hidden states [..., hidden] -> [..., vocab]."""
        return linear(hidden, self.output_weight)

    def head_forward(self, ids: Tensor, hidden: Tensor, context: Context, step: int = 0) -> tuple[Tensor, Tensor]:
        """The head over rows: each takes the embedding of `ids` and a hidden state; position t predicts token t + 2.

        Args:
            ids: [batch, rows], the token after each row's position.
            hidden: [batch, rows, hidden], the target's (step 0) or the recycled one.
            context: positions and the draft cache.
            step: draft step, which selects the physical layer where a family has one a step.
        Returns:
            (output for `logits`, hidden to recycle), both [batch, rows, hidden].
        """
        assert self.mtp is not None
        rope = self.rotary(context.positions, hidden.dtype)
        return self.mtp(self.embed(ids), hidden, rope, context, step)


class Decoder(Drafter):
    """A target, with its head as a submodule; there is one embedding and one output head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        seen = {"full": 0, "linear": 0}
        layers = []
        for kind, sparse in zip(config.layer_kinds, config.sparse_layers, strict=True):
            layers.append(DecoderLayer(config, kind, seen[kind], sparse))
            seen[kind] += 1
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden, config.eps, config.one_plus)

    def forward(self, ids: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Hidden states of token ids [batch, rows].

        Returns:
            (after the final norm, before it), both [batch, rows, hidden].
        """
        x = self.embed(ids)
        rope = self.rotary(context.positions, x.dtype)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, rope, context)
        return self.norm.add(x, residual)

    def head_hidden(self, post_norm: Tensor, pre_norm: Tensor) -> Tensor:
        """Which of the target's hidden states the head is given, as the family says."""
        return post_norm if self.config.family.target_hidden == "post_norm" else pre_norm
