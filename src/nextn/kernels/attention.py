"""Attention of a few query rows over paged keys and values, and the write into the pages.

Pools are [pages, page_size, kv_heads, head_dim]; a block table [batch, n] names each sequence's pages in order, so
position p of sequence b lies in page ``table[b, p // page_size]`` at offset ``p % page_size``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from nextn.kernels.norm import wide


def slots_of(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Flat slot of each position. table [batch, n], positions [batch, rows] -> [batch, rows] int64."""
    pages = table.gather(1, positions // page_size)
    return pages.long() * page_size + positions % page_size


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Store k, v [batch, rows, kv_heads, head_dim] at flat slots [batch, rows] of the pools, in place."""
    at = slots.reshape(-1)
    k_pool.view(-1, *k_pool.shape[2:]).index_copy_(0, at, k.reshape(-1, *k.shape[2:]))
    v_pool.view(-1, *v_pool.shape[2:]).index_copy_(0, at, v.reshape(-1, *v.shape[2:]))


def paged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, positions: Tensor, length: int, scale: float
) -> Tensor:
    """Causal attention of q over the pages; row i of sequence b sees keys at positions <= positions[b, i].

    Args:
        q: [batch, rows, heads, head_dim].
        k_pool, v_pool: [pages, page_size, kv_heads, head_dim].
        table: [batch, n] page ids.
        positions: [batch, rows].
        length: keys to look at: at least max(positions) + 1.
    Returns:
        [batch, rows, heads, head_dim] in q's dtype.
    """
    batch = q.shape[0]
    page_size = k_pool.shape[1]
    pages = table[:, : -(-length // page_size)]
    k = k_pool[pages].view(batch, -1, *k_pool.shape[2:])[:, :length]
    v = v_pool[pages].view(batch, -1, *v_pool.shape[2:])[:, :length]
    seen = torch.arange(length, device=q.device) <= positions[..., None]
    return masked_attention(q, k, v, seen, scale)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Grouped-query attention under an explicit mask.

    Args:
        q: [batch, rows, heads, head_dim].
        k, v: [batch, keys, kv_heads, head_dim].
        seen: [batch, rows, keys] bool, True where the row may look.
    Returns:
        [batch, rows, heads, head_dim] in q's dtype; the softmax runs in at least float32.
    """
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    grouped = (
        q.view(batch, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * rows, dim)
    )
    scores = torch.matmul(grouped * scale, k.permute(0, 2, 3, 1))
    scores = wide(scores.view(batch, kv_heads, group, rows, -1)).masked_fill(~seen[:, None, None], float("-inf"))
    weights = scores.softmax(-1).to(v.dtype).view(batch, kv_heads, group * rows, -1)
    out = torch.matmul(weights, v.transpose(1, 2))
    return out.view(batch, kv_heads, group, rows, -1).permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, -1)


def prefill_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, starts: Sequence[int], scale: float
) -> Tensor:
    """`paged_attention` of many rows, by the library's fused kernel where it has one.

    Args:
        q: [batch, rows, heads, head_dim], rows at positions starts[b] .. starts[b] + rows - 1.
        k_pool, v_pool, table: as in `paged_attention`.
    Returns:
        [batch, rows, heads, head_dim].
    """
    batch, rows = q.shape[:2]
    page_size = k_pool.shape[1]
    out = torch.empty_like(q)
    for start in sorted(set(starts)):
        alike = [b for b in range(batch) if starts[b] == start]
        some = slice(None) if len(alike) == batch else torch.tensor(alike, device=q.device)
        length = start + rows
        pages = table[some, : -(-length // page_size)]
        k, v = (pool[pages].flatten(1, 2)[:, :length].transpose(1, 2) for pool in (k_pool, v_pool))
        query = q[some].transpose(1, 2)
        mask = causal_lower_right(rows, length) if start else None
        found = F.scaled_dot_product_attention(
            query, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        out[some] = found.transpose(1, 2)
    return out


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of whole sequences, all [batch, rows, heads or kv_heads, head_dim] -> shape of q."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)
