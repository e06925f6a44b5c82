"""Where the documents of a packed batch stand, and the two shapes that computing across rows needs.

Attention and recurrence stay inside documents. On a CPU that is done on padded groups of documents of similar
length; fused kernels take the boundaries instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from nextn.kernels.gdn_fused import Bounds


class Packed(Protocol):
    """A packed batch of T tokens (`nextn.train.packing.PackedBatch`): ids, positions restarting at each document,
    document numbers (-1 is padding), and which tokens may be predicted; all [1, T]."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def documents(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Group:
    """Documents of similar length, padded to the longest of them.

    Attributes:
        rows: [documents, length] int64, each place's row in the packed batch; padding repeats a document's last row.
        real: [documents, length] bool, which places are not padding.
    """

    rows: Tensor
    real: Tensor

    def take(self, packed: Tensor) -> Tensor:
        """[1, T, ...] -> [documents, length, ...]."""
        return packed[0].index_select(0, self.rows.view(-1)).view(*self.rows.shape, *packed.shape[2:])

    def put(self, into: Tensor, padded: Tensor) -> Tensor:
        """[1, T, ...] with this group's rows replaced by those of [documents, length, ...]."""
        return into.index_copy(1, self.rows[self.real], padded[self.real][None])


class Layout:
    """Document boundaries of one packed batch.

    Args:
        documents: [1, T] int64 on any device; equal numbers are side by side, -1 is padding.
        host: the same on the CPU where it is there too, so that nothing waits for the device.

    Attributes:
        masks: block masks that attention made of this batch, by the number of draft steps whose keys they cover.
    """

    def __init__(self, documents: Tensor, host: Tensor | None = None) -> None:
        self.documents = documents
        self.masks: dict[int, Any] = {}
        self._host = host

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of each document."""
        numbers = (self.documents if self._host is None else self._host)[0].cpu()
        edges = torch.nonzero(numbers[1:] != numbers[:-1])[:, 0] + 1
        starts = [0, *edges.tolist()]
        stops = [*starts[1:], len(numbers)]
        return [(a, b) for a, b in zip(starts, stops, strict=True) if numbers[a] >= 0]

    @cached_property
    def groups(self) -> list[Group]:
        """Documents by length, each group at most twice as long as its shortest."""
        by_size: dict[int, list[tuple[int, int]]] = {}
        for start, stop in self.spans:
            by_size.setdefault((stop - start - 1).bit_length(), []).append((start, stop))
        return [self._group(spans) for _, spans in sorted(by_size.items())]

    @cached_property
    def bounds(self) -> Bounds:
        """Where each document begins, and the end of the last; padding is outside."""
        return Bounds([start for start, _ in self.spans] + [self.spans[-1][1]], self.documents.device)

    @property
    def used(self) -> int:
        """Rows before the padding."""
        return self.spans[-1][1] if self.spans else 0

    def same_document(self, shift: int) -> Tensor:
        """[1, T] bool: row t and row t + shift are of one document; False at padding and past the end."""
        d = self.documents
        out = torch.zeros_like(d, dtype=torch.bool)
        if shift < d.shape[1]:
            out[:, : d.shape[1] - shift] = (d[:, shift:] == d[:, : d.shape[1] - shift]) & (d[:, shift:] >= 0)
        return out

    def _group(self, spans: list[tuple[int, int]]) -> Group:
        device = self.documents.device
        bounds = torch.tensor(spans, dtype=torch.int64, device=device)
        length = max(stop - start for start, stop in spans)
        rows = bounds[:, :1] + torch.arange(length, device=device)
        real = rows < bounds[:, 1:]
        return Group(torch.minimum(rows, bounds[:, 1:] - 1), real)


def blocks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive pieces of at most `size`."""
    for start in range(0, length, size):
        yield start, min(start + size, length)
