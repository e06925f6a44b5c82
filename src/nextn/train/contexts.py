"""Contexts of a training step: the target over packed documents, and the head's draft steps of all chains at once.

Chain t drafts after position t. Its step k (from 1) stands at position t + k - 1, takes the embedding of token t + k,
and predicts token t + k + 1. Where one physical layer serves all steps, step k sees the first steps of all chains of
its document up to t, and its own chain's later steps: that is what the draft cache holds when an engine drafts, since
each extend overwrites what earlier rounds drafted. It never sees another chain's later steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nextn.kernels import gdn
from nextn.kernels.gdn_fused import available, gdn_chunk_fused
from nextn.kernels.rope import Rope, qk_norm_rope
from nextn.kernels.support import available as triton_runs
from nextn.models.context import DeltaInput, QKNorm
from nextn.train.layout import Group, Layout, blocks

QUERY_BLOCK = 256
"""Rows of a block of attention on a CPU; its keys are the document's first ones up to its end, and its own."""

MASK_BLOCK = 128
"""Rows and keys of a block of flex_attention's mask."""

Keys = tuple[Tensor, Tensor]
"""Keys and values [1, T, kv_heads, head_dim]."""


class PackedContext:
    """Packed documents without a past: a row sees the rows of its own document up to itself.

    Args:
        layout: the batch's documents.
        positions: [1, T] int64.
    """

    def __init__(self, layout: Layout, positions: Tensor) -> None:
        self.layout, self.positions = layout, positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: QKNorm, rope: Rope) -> Tensor:
        q, k = qk_norm_rope(q, k, norms.q, norms.k, norms.eps, rope)
        return chain_attention(self.layout, q, [(k, v)])

    def delta(self, layer: int, x: DeltaInput) -> Tensor:
        """Convolution over shifted rows of the same document; the recurrence starts anew at each document."""
        q, k, v = x.split(packed_conv(self.layout, x.mixed, x.conv))
        g, beta = gdn.decay_and_strength(x.a, x.b, x.a_log, x.dt_bias)
        if available(v):
            return _delta_fused(self.layout, q, k, v, g, beta)
        out = torch.zeros_like(v)
        for group in self.layout.groups:
            padded = gdn.gdn_chunk(group.take(q), group.take(k), group.take(v), group.take(g), group.take(beta), None)[
                0
            ]
            out = group.put(out, padded)
        return out


class UnrollContext:
    """The head's draft steps of all chains of a packed batch, one call of the head after the other.

    A physical layer that is called again continues its chains (one layer for all steps); a layer's first call is
    causal over its own rows (one layer a step).

    Args:
        layout: the batch's documents.
        positions: [1, T] int64, of the chains' starts.

    Attributes:
        step: steps done; the caller counts it up.
    """

    def __init__(self, layout: Layout, positions: Tensor) -> None:
        self.layout, self.starts = layout, positions
        self.step = 0
        self.kept: dict[int, list[Keys]] = {}

    @property
    def positions(self) -> Tensor:
        return self.starts + self.step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: QKNorm, rope: Rope) -> Tensor:
        q, k = qk_norm_rope(q, k, norms.q, norms.k, norms.eps, rope)
        keys = self.kept.setdefault(layer, [])
        keys.append((k, v))
        return chain_attention(self.layout, q, keys)

    def delta(self, layer: int, x: DeltaInput) -> Tensor:
        raise AssertionError("an MTP head has no delta-net layers")


def chain_attention(layout: Layout, q: Tensor, keys: list[Keys]) -> Tensor:
    """Row t sees rows up to t of its document in the first keys, and row t alone in each of the others.

    Args:
        layout: the batch's documents.
        q: [1, T, heads, head_dim].
        keys: of the first step, then of the chains' later ones.
    Returns:
        as q; zeros at padding.
    """
    if q.is_cuda:
        return _flex(layout, q, keys, _compiled_flex())
    out = torch.zeros_like(q)
    for group in layout.groups:
        padded = [(group.take(k), group.take(v)) for k, v in keys]
        out = group.put(out, _grouped(group, group.take(q), padded))
    return out


def _grouped(group: Group, q: Tensor, keys: list[Keys]) -> Tensor:
    """`chain_attention` of documents [documents, length, ...], query block by query block."""
    outs = []
    for start, stop in blocks(q.shape[1], QUERY_BLOCK):
        first_k, first_v = (x[:, :stop] for x in keys[0])
        own = [(k[:, start:stop], v[:, start:stop]) for k, v in keys[1:]]
        k = torch.cat([first_k, *(k for k, _ in own)], 1)
        v = torch.cat([first_v, *(v for _, v in own)], 1)
        outs.append(_masked(q[:, start:stop], k, v, block_mask(start, stop, len(own), q.device)))
    return torch.cat(outs, 1)


def block_mask(start: int, stop: int, own: int, device: torch.device) -> Tensor:
    """[rows, keys] bool for query rows start..stop of a document: first keys 0..stop, then `own` times the rows'."""
    rows = torch.arange(start, stop, device=device)
    causal = rows[:, None] >= torch.arange(stop, device=device)
    itself = torch.eye(stop - start, dtype=torch.bool, device=device)
    return torch.cat([causal] + [itself] * own, 1)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of [batch, rows, heads, head_dim] over [batch, keys, kv_heads, head_dim] under a mask."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask).transpose(1, 2)


def _flex(layout: Layout, q: Tensor, keys: list[Keys], kernel: Callable[..., Tensor]) -> Tensor:
    """`chain_attention` through flex_attention, whose block mask skips what no row sees."""
    rows = q.shape[1]
    pad = (0, 0, 0, 0, 0, -rows % MASK_BLOCK)
    k, v = (torch.cat([F.pad(x, pad) for x in parts], 1).transpose(1, 2) for parts in zip(*keys, strict=True))
    if len(keys) not in layout.masks:
        layout.masks[len(keys)] = layout_mask(layout.documents, len(keys))
    mask = layout.masks[len(keys)]
    return kernel(F.pad(q, pad).transpose(1, 2), k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)[:, :rows]


def layout_mask(documents: Tensor, steps: int) -> Any:
    """Block mask over the keys of `steps` calls side by side, each padded to whole blocks.

    The blocks are named from where documents begin; asking the mask at every pair of rows would take gigabytes.
    """
    from torch.nn.attention.flex_attention import BlockMask

    number = F.pad(documents[0], (0, -documents.shape[1] % MASK_BLOCK), value=-1)
    rows = len(number)
    index = torch.arange(rows, device=number.device)
    begins = torch.cat((index[:1] == 0, number[1:] != number[:-1]))
    begin = torch.where(begins, index, 0).cummax(0).values  # where each row's document begins

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = key % rows
        first = (key < rows) & (row <= query) & (number[row] == number[query])
        return first | ((key >= rows) & (row == query))

    block = torch.arange(rows // MASK_BLOCK, device=number.device)
    earlier = (block <= block[:, None]) & (block >= begin[::MASK_BLOCK, None] // MASK_BLOCK)
    whole = earlier & (block < block[:, None]) & (begin[MASK_BLOCK - 1 :: MASK_BLOCK, None] <= block * MASK_BLOCK)
    own = torch.eye(len(block), dtype=torch.bool, device=number.device).repeat(1, steps - 1)
    partial = _listed(torch.cat((earlier & ~whole, own), 1))
    full = _listed(F.pad(whole, (0, own.shape[1])))
    lengths = (rows, steps * rows)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=MASK_BLOCK, mask_mod=seen, seq_lengths=lengths)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[query blocks, key blocks] bool -> how many a query block has, and which, the chosen ones first; int32."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """flex_attention compiled; past dynamo's own limit it would silently make whole score matrices instead.

    Target and head, each number of draft steps, training and evaluation are graphs of their own.
    """
    from torch import _dynamo
    from torch.nn.attention.flex_attention import flex_attention

    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention)


def packed_conv(layout: Layout, mixed: Tensor, weight: Tensor) -> Tensor:
    """The delta net's causal convolution with silu, inside documents.

    Args:
        mixed: [1, T, channels].
        weight: [channels, kernel].
    """
    if triton_runs(mixed.device) and mixed.dtype != torch.float64 and not mixed.requires_grad:
        from nextn.kernels import packed_conv_triton

        return packed_conv_triton.packed_conv(layout.documents, mixed, weight)
    kernel = weight.shape[1]
    out = mixed * weight[:, -1]
    for back in range(1, kernel):
        same = F.pad(layout.same_document(back), (back, 0))[:, : mixed.shape[1], None]
        shifted = F.pad(mixed, (0, 0, back, 0))[:, : mixed.shape[1]]
        out = out + shifted.masked_fill(~same, 0) * weight[:, kernel - 1 - back]
    return F.silu(out)


def _delta_fused(layout: Layout, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence of all documents in one call; zeros at padding."""
    rows = v.shape[1]
    q, k, v, g, beta = (x[:, : layout.used] for x in (q, k, v, g, beta))
    out, _ = gdn_chunk_fused(q, k, v, g, beta, None, layout.bounds)
    return F.pad(out, (0, 0, 0, 0, 0, rows - layout.used))
