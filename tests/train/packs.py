"""Packed batches from lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nextn.train.packing import Document, PackedBatch, pack


def packed(documents: Sequence[Sequence[int]], padding: int = 0) -> PackedBatch:
    """Documents whose tokens may all be predicted, with `padding` tokens after them."""
    made = [Document(list(d), [True] * len(d)) for d in documents]
    return pack(made, sum(map(len, documents)) + padding)


def random_documents(lengths: Sequence[int], vocab: int = 97, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
