"""Batches read ahead are those read one by one, and the position told is that of the batches given out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.train.ahead import BATCHES, Ahead
from nextn.train.config import TrainConfig
from nextn.train.processes import Processes
from nextn.train.source import DataSource
from tests.train import runs

ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    root = tmp_path_factory.mktemp("ahead")
    runs.data(root / "data.jsonl", lines=60)
    return runs.config(root, runs.target(root / "model"))


def source(config: TrainConfig) -> DataSource:
    assert config.model is not None
    return DataSource(config, runs.reader(config, open_checkpoint(config.model)), ALONE)


@pytest.fixture
def ahead(config: TrainConfig) -> Iterator[Ahead]:
    made = Ahead(source(config))
    yield made
    made.close()


def test_the_same_batches_positions_and_reports(config: TrainConfig, ahead: Ahead) -> None:
    plain = source(config)
    assert ahead.state_dict() == plain.state_dict()
    for _ in range(3 * BATCHES):
        assert torch.equal(ahead.take()[0].ids, plain.take()[0].ids)
        assert ahead.state_dict() == plain.state_dict()
        assert ahead.report() == plain.report()


def test_goes_on_where_a_position_was_taken(config: TrainConfig, ahead: Ahead) -> None:
    for _ in range(5):
        ahead.take()
    state = ahead.state_dict()
    following = [ahead.take()[0].ids for _ in range(4)]
    ahead.load_state_dict(state)
    assert ahead.state_dict() == state
    again = Ahead(source(config))
    again.load_state_dict(state)
    for ids in following:
        assert torch.equal(ahead.take()[0].ids, ids)
        assert torch.equal(again.take()[0].ids, ids)
    again.close()


def test_an_error_reaches_the_step_that_wants_the_batch(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"input_ids": [1]}\n')
    made = Ahead(source(config.model_copy(update={"data": [str(tmp_path / "empty.jsonl")]})))
    for _ in range(2):
        with pytest.raises(NextnError, match="no token to predict in"):
            made.take()
    made.close()
