"""Two processes under torchrun, sharded with FSDP2, take the same steps as one, and share its checkpoints."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from nextn.checkpoint.source import open_checkpoint
from nextn.train.config import TrainConfig
from nextn.train.processes import Processes
from nextn.train.shard import gathered, shard
from nextn.train.start import start
from tests.train import cache_worker, runs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    runs.data(folder / "data.jsonl", repeat=True)
    runs.data(folder / "eval.jsonl", lines=8, seed=5, repeat=True)
    return folder


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return runs.target(root / "model", "qwen3_5")


@pytest.fixture(scope="module")
def tied(root: Path) -> Path:
    return runs.target(root / "tied", "qwen3_5_moe", tied=True)


def launch(made: TrainConfig, world: int, *options: str, command: str = "train") -> None:
    """The command itself, in `world` processes."""
    run(world, "nextn.cli", command, *words(made), *options)


def words(made: TrainConfig) -> list[str]:
    given = [f"{key}={value}" for key, value in made.model_dump(exclude_none=True).items() if key != "data"]
    return [*given, f"data={made.data[0]}" if made.data else "data=[]"]


def start_of(world: int, module: str, *words: str) -> list[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    return [sys.executable, *start, "-m", module, *words]


def run(world: int, module: str, *words: str) -> None:
    done = subprocess.run(
        start_of(world, module, *words),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def figures(made: TrainConfig, step: int) -> dict[str, Any]:
    """Everything that the evaluation of a step found."""
    records = map(json.loads, (Path(made.output) / "logs" / "log.jsonl").read_text().splitlines())
    return next(r["eval"] for r in records if "eval" in r and r["step"] == step)  # type: ignore[no-any-return]


def config(root: Path, model: Path, output: str, **values: Any) -> TrainConfig:
    return runs.config(root, model, output=str(root / output), accumulation=2, **values)


def test_two_processes_take_the_steps_of_one(root: Path, model: Path) -> None:
    """Losses to 1e-5 in float32; the head as well; accept length is the same."""
    options: dict[str, Any] = {"eval": str(root / "eval.jsonl"), "eval_every": 3, "eval_draft_tokens": 2, "save": 3}
    options |= {"eval_tokens": 2 * 48 + 1, "keep_best": False}
    alone = config(root, model, "one", **options)
    facts = runs.trainer(alone).run()
    together = config(root, model, "two", **options)
    launch(together, 2)
    found, expected = runs.losses(together), runs.losses(alone)
    assert len(found) == 6
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5
    mine, theirs = (load_file(Path(c.output) / "model.safetensors") for c in (together, alone))
    assert max(float((mine[k] - theirs[k]).abs().max()) for k in theirs) < 1e-4
    assert len(open_checkpoint(together.output).tensors) == len(theirs)
    assert runs.evaluations(together)[3] == pytest.approx(runs.evaluations(alone)[3], abs=1e-3)
    assert len(runs.trainer(alone).held_out) % 2, "one process has a batch more to judge"
    assert figures(together, 0) == figures(alone, 0)
    assert facts["steps"] == 6


def test_two_processes_follow_one_with_muon(root: Path, model: Path) -> None:
    """Its updates are made in bfloat16, so the losses part in the fourth digit; a killed run goes on alone."""
    alone = config(root, model, "muon-one", optimizer="muon")
    runs.trainer(alone).run()
    together = config(root, model, "muon-two", optimizer="muon", steps=3, schedule="constant", warmup=0)
    launch(together, 2)
    straight = config(root, model, "muon-same", optimizer="muon", schedule="constant", warmup=0)
    runs.trainer(straight).run()
    runs.trainer(together.model_copy(update={"steps": 6})).run()
    found, expected = runs.losses(together), runs.losses(straight)
    assert len(found) == 6
    assert found == pytest.approx(expected, rel=2e-3)
    assert runs.losses(alone) != pytest.approx(expected, rel=2e-3)


def test_a_run_goes_on_with_another_number_of_processes(root: Path, tied: Path) -> None:
    """Three steps by two processes, the rest by one: the losses of six steps by one. Embedding and output head are one
    sharded tensor here, in bfloat16."""
    options: dict[str, Any] = {"schedule": "constant", "target_dtype": "bfloat16"}
    whole = config(root, tied, "whole", **options)
    runs.trainer(whole).run()
    launch(config(root, tied, "parts", **options, steps=3, save=3), 2)
    rest = config(root, tied, "parts", **options)
    runs.trainer(rest).run()
    pairs = zip(runs.losses(rest), runs.losses(whole), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-4


def test_two_processes_killed_at_a_random_step(root: Path, model: Path) -> None:
    """SIGKILL to both at once; the same command gives the losses and the head of two that ran through, bit for bit."""
    options: dict[str, Any] = {"steps": 80, "save": 7, "keep": 2}
    whole, parts = (config(root, model, name, **options) for name in ("through", "cut"))
    launch(whole, 2)
    log = Path(parts.output) / "logs" / "log.jsonl"
    at = random.Random(int.from_bytes(os.urandom(4))).randint(8, 60)
    process = subprocess.Popen(
        start_of(2, "nextn.cli", "train", *words(parts)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    while not (log.is_file() and len(log.read_text().splitlines()) >= at) and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    for number in (process.pid, *map(int, workers.stdout.split())):
        os.kill(number, signal.SIGKILL)
    process.wait()
    saved = [int(p.name.removeprefix("step-")) for p in (Path(parts.output) / "checkpoints").glob("step-*")]
    assert 0 < max(saved) < 80, at
    assert len(saved) <= 3, "two are kept, and one more while it takes the place of the oldest"
    launch(parts, 2)
    assert {p.name for p in (Path(parts.output) / "checkpoints").iterdir()} == {"step-77", "step-80"}
    assert runs.losses(parts) == runs.losses(whole), at
    mine, theirs = ((Path(c.output) / "model.safetensors").read_bytes() for c in (parts, whole))
    assert mine == theirs


def test_every_parameter_is_sharded(root: Path, model: Path) -> None:
    """Each of two processes holds half of each matrix; outside a step nothing is whole, inside only what is used."""
    alone = start(config(root, model, "none"), Processes(0, 1, torch.device("cpu"))).model
    sizes = {name: p.numel() for name, p in alone.named_parameters()}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        pair = Processes(0, 2, torch.device("cpu"))
        begun = start(config(root, model, "none"), pair)
        shard(begun.model, begun.unroll, pair)
        assert {name for name, _ in begun.model.named_parameters()} == set(sizes)
        for name, parameter in begun.model.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert parameter.to_local().numel() == -(-parameter.shape[0] // 2) * (sizes[name] // parameter.shape[0])
        with gathered(begun.model):
            weight = begun.model.output_weight
            assert not isinstance(weight, DTensor)
            assert weight.shape == (97, 32)
            assert isinstance(begun.model.layers[0].input_norm.weight, DTensor)  # type: ignore[union-attr, index]
        assert isinstance(begun.model.output_weight, DTensor)
    finally:
        dist.destroy_process_group()


# -- cached hidden states -------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_processes_write_the_cache_of_one(root: Path, tied: Path) -> None:
    """Shard by shard and byte by byte: five batches in shards of two, begun by two processes and completed by one, and
    the other way round; shards that went missing are written again."""
    made = runs.config(root, tied, steps=5, output=str(root / "none"))
    (root / "cache.cfg").write_text(made.model_dump_json())

    def write(out: str, *parts: tuple[int, int]) -> dict[str, bytes]:
        for world, count in parts:
            if world == 1:
                cache_worker.write(made, root / out, count, 10_000)
            else:
                run(world, "tests.train.cache_worker", str(root / "cache.cfg"), str(root / out), str(count), "10000")
        return contents(root / out)

    alone = write("alone", (1, 5))
    assert len(alone) == 5, "three shards, the facts and the counts"
    assert write("mixed", (2, 4), (1, 5)) == alone == write("other", (1, 2), (2, 5))
    for number in (0, 2):
        (root / "mixed" / f"states-{number:05d}.safetensors").unlink()
    assert write("mixed", (2, 5)) == alone


def test_the_cache_command_under_torchrun(root: Path, model: Path) -> None:
    """Training from it gives the losses of training online."""
    online = config(root, model, "online", steps=3)
    runs.trainer(online).run()
    launch(online, 2, "--out", str(root / "states"), command="cache")
    launch(online, 1, "--out", str(root / "states-alone"), command="cache")
    assert contents(root / "states") == contents(root / "states-alone")
    offline = config(root, model, "offline", steps=3, data=[], cache=str(root / "states"))
    launch(offline, 2)
    pairs = zip(runs.losses(offline), runs.losses(online), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-5
