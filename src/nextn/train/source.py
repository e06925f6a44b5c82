"""Where a run's packed batches come from: data files read as the run goes, or hidden states cached before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from nextn.errors import NextnError
from nextn.train.config import TrainConfig
from nextn.train.data import Batches, batches
from nextn.train.documents import LineReader
from nextn.train.packing import PackedBatch
from nextn.train.processes import Processes
from nextn.train.step import Item

VOCAB_TOKENS = 4_000_000
"""Tokens of the data that are counted to choose a draft vocabulary, about."""


class Source(Protocol):
    """Packed batches without end; each process takes its share of the one global sequence."""

    def take(self) -> Item: ...

    def id_counts(self, vocab: int) -> Tensor:
        """[vocab] int64: how often each id is predicted (`count_ids`), the same on every process."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the global sequence, the same on every process; JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def report(self) -> dict[str, Any]:
        """What was read and what could not be used."""
        ...


class DataSource:
    """Data files, read as the run goes; arguments as the run's."""

    def __init__(self, config: TrainConfig, reader: LineReader, processes: Processes) -> None:
        self.config, self.reader = config, reader
        self.batches = self._batches(rank=processes.rank, world=processes.world)

    def take(self) -> Item:
        return next(self.batches), None

    def id_counts(self, vocab: int) -> Tensor:
        return count_ids(self._batches(epochs=1), vocab)

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state)

    def report(self) -> dict[str, Any]:
        return self.batches.report.as_json()

    def _batches(self, rank: int = 0, world: int = 1, epochs: int | None = None) -> Batches:
        c = self.config
        return batches(
            c.data, self.reader, batch_tokens=c.batch_tokens, seed=c.seed, rank=rank, world=world, epochs=epochs
        )


def held_out(config: TrainConfig, reader: LineReader) -> list[PackedBatch]:
    """The evaluation's batches, every time the same: about `eval_tokens` tokens in the order of the file."""
    assert config.eval is not None
    found: list[PackedBatch] = []
    tokens = 0
    for batch in batches([config.eval], reader, batch_tokens=config.batch_tokens, epochs=1, shuffle=False):
        found.append(batch)
        tokens += batch.ids.shape[1]
        if tokens >= config.eval_tokens:
            break
    return found


def count_ids(data: Iterable[PackedBatch], vocab: int) -> Tensor:
    """[vocab] int64: how often each id is predicted in one pass over the data, of which about VOCAB_TOKENS are read."""
    seen = torch.zeros(vocab, dtype=torch.int64)
    tokens = 0
    for batch in data:
        seen += torch.bincount(batch.ids[batch.loss_mask], minlength=vocab)
        tokens += batch.ids.numel()
        if tokens >= VOCAB_TOKENS:
            break
    return seen


def frequent_ids(source: Source, count: int, vocab: int) -> Tensor:
    """The `count` ids that a source predicts most often, ascending; of those as frequent, the first.

    Raises:
        NextnError: more ids than there are.
    """
    if count > vocab:
        raise NextnError(f"draft_vocab is {count}, and the vocabulary has {vocab} ids.", "Give fewer, or leave it out.")
    return source.id_counts(vocab).argsort(descending=True, stable=True)[:count].sort().values
