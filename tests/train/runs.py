"""Small runs: a random checkpoint of a chosen architecture, data of ids, and a trainer over them."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nextn.checkpoint.source import Checkpoint
from nextn.models.config import decoder_config
from nextn.train.config import TrainConfig, load_config
from nextn.train.documents import LineReader
from nextn.train.processes import processes
from nextn.train.step import HeadStep
from nextn.train.trainer import Trainer
from tests.oracle.checkpoints import make_checkpoint
from tests.train.packs import random_documents

SMALL: dict[str, Any] = {
    "steps": 6,
    "unroll": 2,
    "batch_tokens": 48,
    "max_length": 32,
    "lr": 0.01,
    "log_every": 1,
    "device": "cpu",
}


def reader(config: TrainConfig, checkpoint: Checkpoint) -> LineReader:
    """Reads lines of ids."""
    return LineReader(None, vocab=decoder_config(checkpoint.config).vocab, max_length=config.max_length)


def target(folder: Path, kind: str = "qwen3_5", **options: Any) -> Path:
    """A checkpoint with a random head."""
    folder.mkdir(parents=True)
    return make_checkpoint(folder, kind, **options)


def data(path: Path, lines: int = 40, vocab: int = 97, seed: int = 0, repeat: bool = False) -> Path:
    """A file of ids; `repeat` makes every document a repetition of few ids, which a head can learn."""
    lengths = torch.randint(5, 32, (lines,), generator=torch.Generator().manual_seed(seed)).tolist()
    documents = random_documents(lengths, vocab, seed)
    if repeat:
        documents = [(d[:3] * 12)[: len(d)] for d in documents]
    path.write_text("".join(json.dumps({"input_ids": d}) + "\n" for d in documents))
    return path


def config(root: Path, model: Path, **values: Any) -> TrainConfig:
    """A run's configuration: SMALL with changes, data and output in `root`."""
    given = {"model": str(model), "data": str(root / "data.jsonl"), "output": str(root / "head"), **SMALL, **values}
    return load_config(None, [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None])


def trainer(made: TrainConfig) -> Trainer:
    with processes("cpu") as group:
        return Trainer(made, group, reader, quiet=True)


def losses(made: TrainConfig) -> list[float]:
    """Losses that a run's log holds, by step."""
    lines = (Path(made.output) / "logs" / "log.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def evaluations(made: TrainConfig) -> dict[int, float]:
    """Accept length by step."""
    lines = (Path(made.output) / "logs" / "log.jsonl").read_text().splitlines()
    return {r["step"]: r["eval"]["accept_length"] for r in map(json.loads, lines) if "eval" in r}


class KilledError(Exception):
    """Stands for the process ending."""


def killed_after(steps: int, made: Any) -> None:
    """Run until `steps` steps are taken, and drop everything."""
    taken = 0
    whole = HeadStep.__call__

    def step(self: HeadStep, items: Any) -> Any:
        nonlocal taken
        if taken == steps:
            raise KilledError
        taken += 1
        return whole(self, items)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadStep, "__call__", step)
        with pytest.raises(KilledError):
            trainer(made).run()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing past `size` bytes fails with an error of the system, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
