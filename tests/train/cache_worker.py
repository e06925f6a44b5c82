"""One of the processes that write a cache in small shards: CONFIG.json OUT BATCHES SHARD_BYTES, under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

from nextn.models.decoder import Decoder
from nextn.train.config import TrainConfig
from nextn.train.hidden_cache import write_cache
from nextn.train.identity import target_identity
from nextn.train.load_target import load_target
from nextn.train.processes import Processes, processes
from nextn.train.shard import shard
from nextn.train.source import DataSource
from nextn.train.start import open_target, target_dtype
from tests.train import runs


def write(config: TrainConfig, out: Path, batches: int, shard_bytes: int) -> None:
    """This process's part."""
    with processes("cpu") as group:
        checkpoint = open_target(config)
        dtype = target_dtype(config, checkpoint, group.device)
        model = load_target(checkpoint, dtype, group)
        assert isinstance(model, Decoder)
        shard(model, None, group)
        source = DataSource(config, runs.reader(config, checkpoint), Processes(0, 1, group.device))
        write_cache(
            model, target_identity(checkpoint, dtype), source, config, out, batches, group, shard_bytes=shard_bytes
        )


if __name__ == "__main__":
    config, out, batches, shard_bytes = sys.argv[1:]
    write(TrainConfig.model_validate_json(Path(config).read_text()), Path(out), int(batches), int(shard_bytes))
