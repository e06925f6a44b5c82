"""The multi-token-prediction head: fuse a token embedding with a hidden state, one decoder layer, end norm.

One module for the kinds *fc + decoder layer* and *eh_proj + decoder layer*; order, norms, fusion and what is
recycled are the family's data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nextn.kernels.rope import Rope
from nextn.models.blocks import Linear, RMSNorm
from nextn.models.config import DecoderConfig
from nextn.models.context import Context


class Fusion(nn.Module):
    """Norm both inputs and map them to one hidden state: fuse([e; h]), or fuse_embed(e) + fuse_hidden(h)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.hidden
        self.embed_first = config.family.order == "embed_first"
        self.embed_norm = RMSNorm(width, config.eps, config.one_plus)
        self.hidden_norm = RMSNorm(width, config.eps, config.one_plus)
        self.fuse = Linear(2 * width, {"fuse": width})

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Both [batch, rows, hidden] -> [batch, rows, hidden]."""
        e, h = self.embed_norm(embedding), self.hidden_norm(hidden)
        return self.fuse(torch.cat((e, h) if self.embed_first else (h, e), -1))


class MTPHead(nn.Module):
    """A native head of one or more physical layers.

    In the ``mtp.`` layout fusion and end norm exist once and layers are numbered; elsewhere each layer has its own.

    Args:
        config: the decoder; `config.head_layers` physical layers are built.
        make_layer: builds the decoder layer number i that the head repeats.
    """

    def __init__(self, config: DecoderConfig, make_layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        family = config.family
        own = any("{i}" in spec.name and ".fuse" in spec.name for spec in family.head)
        count = config.head_layers if own else 1
        self.fusions = nn.ModuleList([Fusion(config) for _ in range(count)])
        self.out_norms = nn.ModuleList([RMSNorm(config.hidden, config.eps, config.one_plus) for _ in range(count)])
        self.blocks = nn.ModuleList([make_layer(i) for i in range(config.head_layers)])
        self.recycle_post = family.recycle == "post_norm"
        self.zero_embed_at_start = family.zero_embed_at_start
        self.reuse = family.physical_layers == "reuse"

    def forward(
        self, embedding: Tensor, hidden: Tensor, rope: Rope, context: Context, step: int = 0
    ) -> tuple[Tensor, Tensor]:
        """embedding and hidden [batch, rows, hidden] -> (output after the end norm, hidden to recycle)."""
        layer = 0 if self.reuse else min(step, len(self.blocks) - 1)
        own = min(layer, len(self.fusions) - 1)
        if self.zero_embed_at_start:
            embedding = embedding.masked_fill((context.positions == 0)[..., None], 0)
        x = self.fusions[own](embedding, hidden)
        x, residual = self.blocks[layer](x, None, rope, context)
        norm = self.out_norms[own]
        assert isinstance(norm, RMSNorm)
        out, stream = norm.add(x, residual)
        return out, out if self.recycle_post else stream
