"""Processes that judge a share of a text each find together what one process finds."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from nextn.errors import NextnError
from nextn.train.evaluate import Evaluation, evaluate, share
from nextn.train.packing import Document, PackedBatch, pack
from nextn.train.processes import Processes
from tests.engine.models import decoder

MODEL = decoder("qwen3", vocab=3, seed=1)
CPU = torch.device("cpu")


class Turn(Processes):
    """One of several processes that take turns: it meets the counts of those before it."""

    met: list[Evaluation]

    def each(self, value: Any) -> list[Any]:
        self.met.append(deepcopy(value))
        return deepcopy(self.met)


def text(batches: int, seed: int) -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(seed)

    def document(at: int) -> Document:
        length = int(torch.randint(3, 12, (), generator=generator))
        ids = torch.randint(0, 3, (length,), generator=generator).tolist()
        return Document(ids, torch.rand(length, generator=generator).gt(0.2).tolist(), f"domain {at % 3}")

    return [pack([document(b), document(b + 1)]) for b in range(batches)]


@given(batches=st.integers(1, 7), world=st.integers(1, 5), seed=st.integers(0, 50))
def test_shares_hold_each_batch_once_and_are_of_one_size(batches: int, world: int, seed: int) -> None:
    data = text(batches, seed)
    shares = [share(data, Processes(rank, world, CPU)) for rank in range(world)]
    assert {len(part) for part in shares} == {-(-batches // world)}
    real = [batch for part in shares for batch in part if any(batch is given for given in data)]
    assert sorted(map(id, real)) == sorted(map(id, data))
    spare = [batch for part in shares for batch in part if not any(batch is given for given in data)]
    assert not any(batch.loss_mask.any() for batch in spare)


@given(batches=st.integers(1, 7), world=st.integers(1, 5), seed=st.integers(0, 50))
@torch.no_grad()
def test_counts_add_up_to_those_of_one_process(batches: int, world: int, seed: int) -> None:
    """To the last digit, by position, length and domain; a share without a place to judge counts nothing."""
    data = text(batches, seed)
    try:
        alone = evaluate(MODEL, data, draft_tokens=2, edges=(4, 7)).as_json()
    except NextnError:
        alone = None
    met: list[Evaluation] = []
    found = None
    for rank in range(world):
        process = Turn(rank, world, CPU)
        object.__setattr__(process, "met", met)
        try:
            found = evaluate(MODEL, share(data, process), draft_tokens=2, edges=(4, 7), together=process).as_json()
        except NextnError:
            found = None
    assert found == alone
