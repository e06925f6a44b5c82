"""The sequences being decoded together, as tensors: what one round reads and leaves for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nextn.engine.sampling import SamplingState


@dataclass
class Batch:
    """Decoding state of `batch` sequences.

    Attributes:
        lengths: [batch] int64, committed positions L; position L is the bonus token's.
        bonus: [batch] int64, the token that the target gave last, in no cache yet.
        drafts: [batch, K] int64.
        draft_probs: [batch, K, vocab] that the drafts were drawn from, None where drafting is greedy.
        committed: [batch] int64, rows of the last target forward that were kept; 0 after a prefill.
        table: [batch, n] int64 page ids; a shorter row goes on with its own first page.
        slots: [batch] int64 sequence slots.
        sampling: parameters and counts.
        bound: host-side upper bound of the lengths.
        head_out, head_hidden: [batch, 1, hidden], the head's output at the last committed position and what it
            recycles: where drafting starts. None where nothing is to be drafted.
    """

    lengths: Tensor
    bonus: Tensor
    drafts: Tensor
    draft_probs: Tensor | None
    committed: Tensor
    table: Tensor
    slots: Tensor
    sampling: SamplingState
    bound: int
    head_out: Tensor | None = None
    head_hidden: Tensor | None = None

    @property
    def size(self) -> int:
        return self.lengths.shape[0]

    @property
    def draft_tokens(self) -> int:
        return self.drafts.shape[1]

    def keep(self, rows: Sequence[int]) -> Batch:
        """Only these sequences, in this order."""
        at = torch.tensor(rows, dtype=torch.int64, device=self.lengths.device)
        return Batch(
            self.lengths[at],
            self.bonus[at],
            self.drafts[at],
            self.draft_probs[at] if self.draft_probs is not None else None,
            self.committed[at],
            self.table[at],
            self.slots[at],
            self.sampling.select(rows),
            self.bound,
            self.head_out[at] if self.head_out is not None else None,
            self.head_hidden[at] if self.head_hidden is not None else None,
        )


def widened(table: Tensor, width: int) -> Tensor:
    """Page ids [batch, n] -> [batch, width]; rows go on with their own first page, which no other sequence has."""
    return torch.cat((table, table[:, :1].expand(-1, width - table.shape[1])), 1)


def join(batches: Sequence[Batch], sampling: SamplingState) -> Batch:
    """Several batches of the same K as one; `sampling` describes all their sequences in order."""
    width = max(b.table.shape[1] for b in batches)
    outs = [b.head_out for b in batches if b.head_out is not None]
    hiddens = [b.head_hidden for b in batches if b.head_hidden is not None]
    probs: list[Tensor] = []
    if not sampling.plan.all_greedy:
        for b in batches:
            given = b.draft_probs
            if given is None:
                given = F.one_hot(b.drafts, sampling.vocab_size).to(torch.float32)
            probs.append(given)
        high = torch.float64 if any(p.dtype == torch.float64 for p in probs) else torch.float32
        probs = [p.to(high) for p in probs]
    return Batch(
        torch.cat([b.lengths for b in batches]),
        torch.cat([b.bonus for b in batches]),
        torch.cat([b.drafts for b in batches]),
        torch.cat(probs) if probs else None,
        torch.cat([b.committed for b in batches]),
        torch.cat([widened(b.table, width) for b in batches]),
        torch.cat([b.slots for b in batches]),
        sampling,
        max(b.bound for b in batches),
        torch.cat(outs) if outs else None,
        torch.cat(hiddens) if hiddens else None,
    )
