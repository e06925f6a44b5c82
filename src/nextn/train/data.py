"""Packed batches from data files: a fixed order for a seed, a share for each rank, resumable between any two batches.

Lines are read in windows of about `WINDOW` batches, and each window is packed by itself, so that the state to resume
from is a few numbers. All ranks see the same sequence of batches and take every world-th, so that the tokens of a
step do not depend on how many ranks share them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nextn.errors import NextnError
from nextn.train.documents import LineReader
from nextn.train.formats import DataReport, MalformedError
from nextn.train.lines import Lines
from nextn.train.packing import Document, PackedBatch, bins, pack

WINDOW = 16
"""Batches that are packed together: more waste less padding and more memory."""


@dataclass
class _Position:
    """Where in the sequence of batches the reader stands.

    Attributes:
        epoch: passes done.
        line: lines of this epoch's order that earlier windows took.
        carried: line numbers whose documents filled the last window's emptiest batch too little, and come again.
        taken: batches of the window at `line` that were given out, to any rank.
        report: what was counted before that window.
    """

    epoch: int = 0
    line: int = 0
    carried: list[int] = field(default_factory=list)
    taken: int = 0
    report: DataReport = field(default_factory=DataReport)


class Batches:
    """An iterator of `PackedBatch`. See `batches` for arguments."""

    def __init__(
        self,
        lines: Lines,
        reader: LineReader,
        *,
        batch_tokens: int,
        seed: int,
        rank: int,
        world: int,
        epochs: int | None,
        shuffle: bool,
        pad: bool,
    ) -> None:
        self.lines, self.reader, self.batch_tokens = lines, reader, batch_tokens
        self.seed, self.rank, self.world, self.epochs = seed, rank, world, epochs
        self.shuffle, self.pad = shuffle, pad
        self.report = DataReport()
        self._at = _Position()
        self._rest: list[list[Document]] | None = None
        self._next = self._at

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        own: list[Document] | None = None
        for turn in range(self.world):
            given = self._take()
            if given is None:
                break
            if turn == self.rank:
                own = given
        if own is None:
            raise StopIteration
        return pack(own, self.batch_tokens if self.pad else None)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches given out so far, the same on every rank; plain JSON."""
        at = self._at
        return {
            "epoch": at.epoch,
            "line": at.line,
            "carried": list(at.carried),
            "taken": at.taken,
            "report": at.report.as_json(),
            "read": self.report.as_json(),
            "data": self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, whatever the number of ranks then and now.

        Raises:
            NextnError: the state belongs to other data or other settings.
        """
        if state["data"] != self._identity():
            raise NextnError(
                "The saved position belongs to other data, another seed or other lengths.",
                "Resume with the data settings of the first run, or start anew.",
            )
        self._at = _Position(
            state["epoch"], state["line"], list(state["carried"]), state["taken"], DataReport(**state["report"])
        )
        self.report = DataReport(**state.get("read", state["report"]))
        self._rest = None

    def _identity(self) -> list[int | str]:
        return [self.lines.identity, self.seed, self.batch_tokens, self.reader.max_length or 0, int(self.shuffle)]

    def _take(self) -> list[Document] | None:
        """The next batch of the global sequence; None at the end of the last epoch."""
        while not self._rest:
            if self._rest is not None:
                self._at = self._next
            if self.epochs is not None and self._at.epoch >= self.epochs:
                self._rest = []
                self._next = self._at
                return None
            self._rest = self._window()[self._at.taken :]
        self._at.taken += 1
        return self._rest.pop(0)

    def _window(self) -> list[list[Document]]:
        """Read and pack the window at the current position; leaves in `_next` where the one after it begins."""
        at = self._at
        order = self._order(at.epoch)
        report = copy.deepcopy(at.report)
        found: list[tuple[int, Document]] = []
        for number in at.carried:
            found += [(number, d) for d in self._documents(number, DataReport())]
        tokens = sum(len(d.ids) for _, d in found)
        line = at.line
        while line < len(order) and tokens < WINDOW * self.batch_tokens:
            number = int(order[line])
            new = self._documents(number, report if at.epoch == 0 else DataReport())
            found += [(number, d) for d in new]
            tokens += sum(len(d.ids) for d in new)
            line += 1
        ended = line == len(order)
        self.report = report
        if ended and at.epoch == 0 and not report.loss_tokens:
            raise NextnError(
                self._nothing(report), "Give one JSON object a line, in UTF-8, with a text or an assistant's turns."
            )
        groups = bins([len(d.ids) for _, d in found], self.batch_tokens)
        carried: list[int] = []
        if not ended and len(groups) > 1:
            emptiest = min(range(len(groups)), key=lambda g: sum(len(found[i][1].ids) for i in groups[g]))
            carried, groups = self._carry(found, groups, emptiest)
        if self.shuffle:
            mixed = np.random.Generator(np.random.Philox(key=[self.seed, (at.epoch << 40) + at.line + 1]))
            groups = [groups[i] for i in mixed.permutation(len(groups))]
        self._next = _Position(at.epoch + ended, 0 if ended else line, carried, 0, report)
        return [[found[i][1] for i in group] for group in groups]

    def _carry(
        self, found: Sequence[tuple[int, Document]], groups: list[list[int]], emptiest: int
    ) -> tuple[list[int], list[list[int]]]:
        """Leave the emptiest batch for the next window, unless a line of it has documents in other batches too."""
        numbers = sorted({found[i][0] for i in groups[emptiest]})
        elsewhere = {found[i][0] for g, group in enumerate(groups) if g != emptiest for i in group}
        if elsewhere.intersection(numbers):
            return [], groups
        return numbers, [group for g, group in enumerate(groups) if g != emptiest]

    def _documents(self, number: int, report: DataReport) -> list[Document]:
        report.lines += 1
        try:
            return self.reader.read(self.lines[number], report)
        except MalformedError as error:
            report.reject(str(error), self.lines.where(number))
            return []

    def _order(self, epoch: int) -> Sequence[int] | np.ndarray[Any, Any]:
        if not self.shuffle:
            return range(len(self.lines))
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch << 40])).permutation(len(self.lines))

    def _nothing(self, report: DataReport) -> str:
        bad = sum(report.malformed.values())
        said = f"{len(self.lines)} lines, {bad} malformed, {report.without_loss} without a token to predict"
        example = f" ({report.examples[0]})" if report.examples else ""
        names = ", ".join(str(path) for path in self.lines.paths[:3]) + (" ..." if len(self.lines.paths) > 3 else "")
        return f"There is no token to predict in {names}: {said}{example}."


def batches(
    files: Sequence[str | Path],
    reader: LineReader,
    *,
    batch_tokens: int,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    epochs: int | None = None,
    shuffle: bool = True,
    pad: bool = True,
) -> Batches:
    """Packed batches of data files.

    Args:
        files: JSONL files or folders of them.
        reader: turns lines into documents; its `max_length` is at most `batch_tokens`.
        batch_tokens: T of each batch.
        seed: of the order.
        rank, world: this process takes every world-th batch, from the rank-th on.
        epochs: passes over the data; None never ends.
        shuffle: mix the lines, anew in each epoch; else they come in order.
        pad: fill each batch up to `batch_tokens`, else it ends with its last document.
    Returns:
        an iterator with `state_dict`, `load_state_dict` and a `report`.
    Raises:
        NextnError: files that cannot be read; while iterating, data without any token to predict.
    """
    if reader.max_length is None or reader.max_length > batch_tokens:
        raise NextnError(
            f"max_length is {reader.max_length} and batch_tokens {batch_tokens}.",
            "Give a max_length of at most batch_tokens.",
        )
    return Batches(
        Lines(files),
        reader,
        batch_tokens=batch_tokens,
        seed=seed,
        rank=rank,
        world=world,
        epochs=epochs,
        shuffle=shuffle,
        pad=pad,
    )
