"""Put documents of different lengths into rows of one length, and say which token belongs to which document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = -1
"""Document index of padding tokens."""


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids that stand alone: nothing before or after them matters.

    Attributes:
        ids: token ids.
        loss_mask: one entry a token: may the head learn to predict it?
        domain: the data's own tag, "" without one.
    """

    ids: Sequence[int]
    loss_mask: Sequence[bool]
    domain: str = ""

    def predictable(self) -> int:
        """Tokens that a head can predict and may: its first row predicts the third token (design: index arithmetic)."""
        return sum(self.loss_mask[2:])


@dataclass(frozen=True)
class PackedBatch:
    """Documents side by side, padding at the end; T tokens. `pack` makes its tensors on the CPU.

    Attributes:
        ids: [1, T] int64; padding is 0.
        positions: [1, T] int64, from 0 in each document, and in the padding.
        documents: [1, T] int64, the document's number in this batch, -1 for padding.
        loss_mask: [1, T] bool: this token may be predicted.
        domains: the tag of each document.
    """

    ids: Tensor
    positions: Tensor
    documents: Tensor
    loss_mask: Tensor
    domains: tuple[str, ...] = ()

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same on another device."""
        ids, positions, documents, mask = (
            x.to(device) for x in (self.ids, self.positions, self.documents, self.loss_mask)
        )
        return PackedBatch(ids, positions, documents, mask, self.domains)


def bins(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Share items among as few bins as first-fit decreasing needs.

    Args:
        lengths: 1 to `room` each.
        room: what a bin holds.
    Returns:
        indices by bin, ascending in each.
    """
    filled: list[list[int]] = []
    left: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = next((b for b, free in enumerate(left) if free >= lengths[item]), len(left))
        if at == len(left):
            left.append(room)
            filled.append([])
        left[at] -= lengths[item]
        filled[at].append(item)
    return [sorted(members) for members in filled]


def pack(documents: Sequence[Document], length: int | None = None) -> PackedBatch:
    """One row that holds the documents in order.

    Args:
        documents: at least one token in all.
        length: T; None for the sum of the documents' lengths.
    """
    sizes = [len(d.ids) for d in documents]
    used = sum(sizes)
    total = used if length is None else length
    assert 0 < used <= total
    ids = torch.zeros(1, total, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    numbers = torch.full_like(ids, PADDING)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    start = 0
    for number, (document, size) in enumerate(zip(documents, sizes, strict=True)):
        row = slice(start, start + size)
        ids[0, row] = torch.tensor(document.ids, dtype=torch.int64)
        positions[0, row] = torch.arange(size)
        numbers[0, row] = number
        mask[0, row] = torch.tensor(document.loss_mask, dtype=torch.bool)
        start += size
    positions[0, used:] = torch.arange(total - used)
    return PackedBatch(ids, positions, numbers, mask, tuple(d.domain for d in documents))
