"""Batches as tensors: what a joined batch's rows can reach."""

from __future__ import annotations

import pytest
import torch

from nextn.engine.batch import Batch, join, widened
from nextn.engine.logits import Plan, power_of_two
from nextn.engine.sampling import SamplingParams, SamplingState


def batch_of(table: list[list[int]]) -> Batch:
    size = len(table)
    sampling = SamplingState.build([SamplingParams(temperature=0.0)] * size, [[0]] * size, vocab_size=8)
    zeros = torch.zeros(size, dtype=torch.int64)
    drafts = torch.empty(size, 0, dtype=torch.int64)
    return Batch(zeros, zeros, drafts, None, zeros, torch.tensor(table), zeros, sampling, 0)


def test_a_row_of_a_table_names_its_own_pages_alone() -> None:
    """Page 0 may be another sequence's."""
    wide = widened(torch.tensor([[3, 7], [5, 1]]), 5)
    assert wide.tolist() == [[3, 7, 3, 3, 3], [5, 1, 5, 5, 5]]
    joined = join([batch_of([[4, 0, 9]]), batch_of([[2], [6]])], batch_of([[1], [1], [1]]).sampling)
    assert joined.table.tolist() == [[4, 0, 9], [2, 2, 2], [6, 6, 6]]


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 32, 33)] == [0, 1, 2, 4, 4, 8, 32, 64]


@pytest.mark.parametrize("asked,reported", [([None, None], None), ([None, 0], 0), ([3, 5], 8), ([90], 50)])
def test_a_plan_reports_what_its_requests_ask_for(asked: list[int | None], reported: int | None) -> None:
    assert Plan.of([SamplingParams(logprobs=n) for n in asked], 50).reported == reported
