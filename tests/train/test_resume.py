"""A run that was killed and resumed gives the losses of one that was not, to the last bit."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nextn.errors import NextnError
from nextn.train.export import write_head
from nextn.train.hidden_cache import write_cache
from nextn.train.lock import held
from nextn.train.processes import Processes
from nextn.train.step import HeadStep
from tests.train import runs

ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    runs.target(folder / "model", "qwen3_5")
    runs.data(folder / "data.jsonl", lines=15, repeat=True)
    runs.data(folder / "eval.jsonl", lines=8, seed=5, repeat=True)
    return folder


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
            runs.trainer(made).run()


@pytest.mark.parametrize(
    ("kills", "save", "seed", "optimizer"),
    [([5], 2, 0, "adamw"), ([1, 3, 1], 1, 3, "adamw"), ([2, 3, 4], 4, 7, "adamw"), ([1, 3], 1, 3, "muon")],
)
def test_losses_are_those_of_an_uninterrupted_run(
    root: Path, tmp_path: Path, kills: list[int], save: int, seed: int, optimizer: str
) -> None:
    """Killed again and again, over the end of the data; evaluations and the final head are the same too."""
    options: dict[str, Any] = {"steps": 8, "save": save, "seed": seed, "eval": str(root / "eval.jsonl")}
    options |= {"eval_every": 4, "eval_draft_tokens": 2, "loss": "lk", "optimizer": optimizer}
    whole = runs.config(root, root / "model", **options, output=str(tmp_path / "whole"))
    parts = runs.config(root, root / "model", **options, output=str(tmp_path / "parts"))
    facts = runs.trainer(whole).run()
    for steps in kills:
        killed_after(steps, parts)
    resumed = runs.trainer(parts).run()
    assert runs.losses(parts) == runs.losses(whole)
    assert runs.evaluations(parts) == runs.evaluations(whole)
    heads = [(Path(c.output) / "model.safetensors").read_bytes() for c in (whole, parts)]
    assert heads[0] == heads[1]
    for key in ("steps", "tokens", "loss", "before", "after", "best_step", "data"):
        assert resumed[key] == facts[key]


def test_a_real_kill(root: Path) -> None:
    """SIGKILL in the middle of the command; the same command goes on."""
    made = runs.config(root, root / "model", steps=400, save=5, output=str(root / "killed"), keep=1)
    words = [f"{k}={v}" for k, v in made.model_dump(exclude_none=True).items() if k not in ("data", "resume")]
    command = [sys.executable, "-m", "nextn.cli", "train", f"data={made.data[0]}", *words]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    log = Path(made.output) / "logs" / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and len(log.read_text().splitlines()) > 12) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = runs.trainer(made)
    begun = resumed.step.done
    assert begun >= 10
    assert begun % 5 == 0
    for _ in range(4):
        resumed._one_step(None)
    whole = runs.config(root, root / "model", steps=400, save=400, output=str(root / "same"))
    straight = runs.trainer(whole)
    for _ in range(begun + 4):
        straight._one_step(None)
    assert straight.tally.loss == resumed.tally.loss
    assert [p.name for p in (Path(made.output) / "checkpoints").glob("step-*")] == [f"step-{begun}"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_a_checkpoint(root: Path, tmp_path: Path, number: int, code: int) -> None:
    made = runs.config(root, root / "model", steps=4000, save=4000, output=str(tmp_path / "head"))
    words = [f"{k}={v}" for k, v in made.model_dump(exclude_none=True).items() if k not in ("data", "resume")]
    command = [sys.executable, "-m", "nextn.cli", "train", f"data={made.data[0]}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    log = Path(made.output) / "logs" / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and len(log.read_text().splitlines()) > 5) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    done = runs.trainer(made).step.done
    assert done > 5
    assert f"stopped after step {done}; the same command goes on from there" in said
    assert len(runs.losses(made)) == done


def test_checkpoints_kept(root: Path) -> None:
    made = runs.config(root, root / "model", steps=7, save=2, keep=2, output=str(root / "kept"))
    runs.trainer(made).run()
    assert sorted(p.name for p in (root / "kept" / "checkpoints").iterdir()) == ["step-6", "step-7"]


def test_the_best_head_outlives_the_checkpoints_around_it(root: Path) -> None:
    """Kept while later steps come and go, and replaced when it is beaten; a rate that ruins makes an early one best."""
    options: dict[str, Any] = {"eval": str(root / "eval.jsonl"), "eval_every": 1, "save": 1, "keep": 1}
    made = runs.config(
        root, root / "model", **options, steps=9, lr=1.0, warmup=0, schedule="constant", output=str(root / "best")
    )
    facts = runs.trainer(made).run()
    found = runs.evaluations(made)
    best = max((s for s in found if s), key=lambda s: found[s])
    assert facts["exported_step"] == best
    assert best < 8
    folders = sorted(p.name for p in (root / "best" / "checkpoints").iterdir())
    assert folders == [f"best-{best}", "step-9"]


def test_a_finished_run_started_again_tells_of_its_data(root: Path, tmp_path: Path) -> None:
    """As it did when it ran, malformed lines included; also where it was killed behind its last checkpoint."""
    lines = (root / "data.jsonl").read_text()
    (tmp_path / "data.jsonl").write_text("{not json\n" + lines + '{"input_ids": [1, 500]}\n')
    made = runs.config(tmp_path, root / "model", steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nextn.train.trainer.Trainer._finish", lambda self: self.source.report())
        read: Any = runs.trainer(made).run()
    assert read["lines"] == 17
    assert sum(read["malformed"].values()) == len(read["examples"]) == 2
    for _ in range(2):
        facts = runs.trainer(made).run()
        assert facts["steps"] == 3
        assert facts["data"] == read
    longer = runs.trainer(runs.config(tmp_path, root / "model", steps=40)).run()
    assert longer["data"] == read


def test_longer_than_planned(root: Path) -> None:
    """More steps may be asked for later; with a constant rate that is the longer run."""
    options: dict[str, Any] = {"schedule": "constant", "warmup": 0}
    runs.trainer(runs.config(root, root / "model", **options, steps=3, output=str(root / "longer"))).run()
    longer = runs.config(root, root / "model", **options, steps=6, output=str(root / "longer"))
    runs.trainer(longer).run()
    whole = runs.config(root, root / "model", **options, steps=6, output=str(root / "long"))
    runs.trainer(whole).run()
    assert runs.losses(longer) == runs.losses(whole)


def test_refuses_another_runs_output(root: Path) -> None:
    options: dict[str, Any] = {"steps": 2, "output": str(root / "taken")}
    runs.trainer(runs.config(root, root / "model", **options)).run()
    with pytest.raises(NextnError, match=r"another lr \(0.01, now 0.02\)"):
        runs.trainer(runs.config(root, root / "model", **options, lr=0.02))
    with pytest.raises(NextnError, match="resume is false"):
        runs.trainer(runs.config(root, root / "model", **options, resume=False))
    with pytest.raises(NextnError, match="holds a run of 2 steps, more than steps = 1"):
        runs.trainer(runs.config(root, root / "model", **{**options, "steps": 1}))
    done = runs.trainer(runs.config(root, root / "model", **options)).run()
    assert done["steps"] == 2


def test_one_process_at_a_time_trains_into_an_output(root: Path) -> None:
    made = runs.config(root, root / "model", steps=2, output=str(root / "shared"))
    with held(root / "shared" / "logs"), pytest.raises(NextnError, match="Another process is training into"):
        runs.trainer(made).run()
    assert not (root / "shared" / "checkpoints").exists()
    assert runs.trainer(made).run()["steps"] == 2


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing past `size` bytes fails with an error of the system, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_loses_nothing(root: Path) -> None:
    options: dict[str, Any] = {"save": 2, "output": str(root / "full")}
    runs.trainer(runs.config(root, root / "model", **options, steps=2)).run()
    kept = sorted(p.name for p in (root / "full" / "checkpoints").iterdir())
    longer = runs.config(root, root / "model", **options, steps=4)
    whole = runs.trainer(longer)
    with files_of_at_most(10_000), pytest.raises(NextnError, match=r"step-4 cannot be written \(File too large\)"):
        whole.run()
    assert sorted(p.name for p in (root / "full" / "checkpoints").iterdir()) == kept == ["step-2"]
    assert runs.trainer(longer).run()["steps"] == 4


def test_a_head_that_does_not_fit_on_the_disk_leaves_the_one_before(root: Path) -> None:
    out = root / "full-head"
    made = runs.trainer(runs.config(root, root / "model", steps=2, output=str(out)))
    made.run()
    before = (out / "model.safetensors").read_bytes()
    with (
        files_of_at_most(10_000),
        pytest.raises(NextnError, match=r"model.safetensors cannot be written \(.*File too large"),
    ):
        write_head(made.begun, out, first=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert not list(out.glob(".*"))


def test_a_damaged_checkpoint_is_named(root: Path) -> None:
    options: dict[str, Any] = {"steps": 2, "output": str(root / "damaged")}
    runs.trainer(runs.config(root, root / "model", **options)).run()
    for file in (root / "damaged" / "checkpoints" / "step-2").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(NextnError, match="step-2 cannot be read"):
        runs.trainer(runs.config(root, root / "model", **options))


# -- cached hidden states -------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["native", "scratch"])
def test_cached_states_give_the_same_losses(root: Path, init: str, tmp_path: Path) -> None:
    """Cached in two visits and small shards, trained from without the target's layers, killed and resumed."""
    online = runs.config(root, root / "model", init=init, steps=5, save=2, output=str(tmp_path / "online"))
    made = runs.trainer(online)
    out = tmp_path / "cache"
    for count in (2, 5):
        source = runs.trainer(online).source
        facts = write_cache(made.begun.model, made.identity, source, online, out, count, ALONE, shard_bytes=10_000)  # type: ignore[arg-type]
    assert facts["batches"] == 5
    assert len(facts["shards"]) > 2
    made.run()
    offline = runs.config(
        root, root / "model", init=init, steps=5, save=2, data=[], cache=str(out), output=str(tmp_path / "offline")
    )
    begun = runs.trainer(offline)
    assert not hasattr(begun.begun.model, "layers")
    killed_after(3, offline)
    runs.trainer(offline).run()
    assert runs.losses(offline) == runs.losses(online)
    heads = [(Path(c.output) / "model.safetensors").read_bytes() for c in (online, offline)]
    assert heads[0] == heads[1]


def test_a_cache_that_fills_the_disk_is_completed_later(root: Path, tmp_path: Path) -> None:
    made = runs.config(root, root / "model", steps=1, output=str(tmp_path / "head"))

    def cache(count: int, name: str) -> dict[str, Any]:
        begun = runs.trainer(made)
        return write_cache(begun.begun.model, begun.identity, begun.source, made, tmp_path / name, count, ALONE)  # type: ignore[arg-type]

    cache(1, "cut")
    with files_of_at_most(1000), pytest.raises(NextnError, match="cannot be written"):
        cache(4, "cut")
    assert not list((tmp_path / "cut").glob(".*"))
    assert cache(4, "cut")["batches"] == cache(4, "whole")["batches"] == 4


def test_refuses_a_cache_of_another_target(root: Path, tmp_path: Path) -> None:
    runs.target(tmp_path / "other", "qwen3_5", seed=1)
    made = runs.config(root, root / "model", steps=1)
    one = runs.trainer(made)
    write_cache(one.begun.model, one.identity, one.source, made, tmp_path / "cache", 1, ALONE)  # type: ignore[arg-type]
    with pytest.raises(NextnError, match="another target"):
        runs.trainer(runs.config(root, tmp_path / "other", cache=str(tmp_path / "cache"), output=str(tmp_path / "h")))
    other = runs.config(root, root / "model", seed=7)
    with pytest.raises(NextnError, match="another seed"):
        write_cache(one.begun.model, one.identity, one.source, other, tmp_path / "cache", 2, ALONE)  # type: ignore[arg-type]
    (tmp_path / "cache" / "states-00000.safetensors").write_bytes(b"\0" * 64)
    broken = runs.config(root, root / "model", cache=str(tmp_path / "cache"), output=str(tmp_path / "h"))
    with pytest.raises(NextnError, match="cannot be read"):
        runs.trainer(broken).run()
    (tmp_path / "cache" / "cache.json").write_text(json.dumps({}))
    with pytest.raises(NextnError, match="another target"):
        runs.trainer(broken)


def retouched(source: Path, out: Path) -> Path:
    """A copy whose first layer was fine-tuned; embedding and output head are the same."""
    shutil.copytree(source, out)
    weights = load_file(out / "model.safetensors")
    name = next(k for k, v in weights.items() if "layers.0." in k and k.startswith("model") and v.dim() == 2)
    weights[name] *= 1.2
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def test_a_fine_tune_is_another_target_and_another_head_is_not(root: Path, tmp_path: Path) -> None:
    made = runs.config(root, root / "model", steps=1, output=str(tmp_path / "head"), merge=str(tmp_path / "merged"))
    one = runs.trainer(made)
    write_cache(one.begun.model, one.identity, one.source, made, tmp_path / "cache", 1, ALONE)  # type: ignore[arg-type]
    one.run()
    fine = retouched(root / "model", tmp_path / "fine")
    told = runs.trainer(runs.config(root, fine, output=str(tmp_path / "a"))).identity
    assert told != one.identity
    with pytest.raises(NextnError, match="another target"):
        runs.trainer(runs.config(root, fine, cache=str(tmp_path / "cache"), output=str(tmp_path / "b")))
    with pytest.raises(NextnError, match="another model"):
        write_cache(one.begun.model, told, one.source, made, tmp_path / "cache", 2, ALONE)  # type: ignore[arg-type]
    other = runs.config(root, tmp_path / "merged", cache=str(tmp_path / "cache"), output=str(tmp_path / "c"))
    assert runs.trainer(other).identity == one.identity
    turned = tmp_path / "turned"
    shutil.copytree(root / "model", turned)
    settings = json.loads((turned / "config.json").read_text())
    settings["rms_norm_eps"] = 1e-3
    (turned / "config.json").write_text(json.dumps(settings))
    assert runs.trainer(runs.config(root, turned, output=str(tmp_path / "e"))).identity != one.identity
    low = runs.config(root, root / "model", target_dtype="bfloat16", output=str(tmp_path / "d"))
    assert runs.trainer(low).identity != one.identity


def test_refuses_to_go_on_with_another_target_or_other_data_under_the_same_path(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "model", tmp_path / "model")
    shutil.copy(root / "data.jsonl", tmp_path / "data.jsonl")
    options: dict[str, Any] = {"steps": 2, "output": str(tmp_path / "head")}
    made = runs.config(tmp_path, tmp_path / "model", **options)
    source = runs.trainer(made).source
    write_cache(runs.trainer(made).begun.model, "m", source, made, tmp_path / "cache", 1, ALONE)  # type: ignore[arg-type]
    runs.trainer(made).run()
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "data.jsonl").read_bytes())
    longer = {**options, "steps": 3}
    assert (
        runs.trainer(runs.config(tmp_path, tmp_path / "model", **longer, data=str(tmp_path / "copy.jsonl"))).step.done
        == 2
    )
    lines = (tmp_path / "data.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "data.jsonl").write_text("".join(reversed(lines)))
    with pytest.raises(NextnError, match="other data"):
        runs.trainer(runs.config(tmp_path, tmp_path / "model", **longer))
    again = runs.trainer(runs.config(tmp_path, tmp_path / "model", output=str(tmp_path / "new")))
    with pytest.raises(NextnError, match="content of its data"):
        write_cache(again.begun.model, "m", again.source, made, tmp_path / "cache", 2, ALONE)  # type: ignore[arg-type]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    shutil.rmtree(tmp_path / "model")
    retouched(root / "model", tmp_path / "model")
    with pytest.raises(NextnError, match="another target"):
        runs.trainer(runs.config(tmp_path, tmp_path / "model", **longer))


def test_refuses_settings_that_contradict_a_cache(root: Path, tmp_path: Path) -> None:
    made = runs.config(root, root / "model", steps=1)
    one = runs.trainer(made)
    write_cache(one.begun.model, one.identity, one.source, made, tmp_path / "cache", 1, ALONE)  # type: ignore[arg-type]
    options: dict[str, Any] = {"cache": str(tmp_path / "cache"), "output": str(tmp_path / "h")}
    for wrong in ({"batch_tokens": 64}, {"max_length": 30}, {"seed": 3}, {"data": "elsewhere.jsonl"}):
        (name,) = wrong
        with pytest.raises(NextnError, match=f"was written with {name}"):
            runs.trainer(runs.config(root, root / "model", **{**options, **wrong}))
    runs.trainer(runs.config(root, root / "model", **options, seed=3, init="scratch"))
    runs.trainer(runs.config(root, root / "model", **options))


def test_a_cache_goes_round(root: Path, tmp_path: Path) -> None:
    """More steps than batches: the batches come again in the same order."""
    made = runs.config(root, root / "model", steps=1)
    one = runs.trainer(made)
    write_cache(one.begun.model, one.identity, one.source, made, tmp_path / "cache", 2, ALONE)  # type: ignore[arg-type]
    source = runs.trainer(
        runs.config(root, root / "model", cache=str(tmp_path / "cache"), output=str(tmp_path / "h"))
    ).source
    taken = [source.take()[0].ids for _ in range(4)]
    assert torch.equal(taken[0], taken[2])
    assert torch.equal(taken[1], taken[3])
    assert not torch.equal(taken[0], taken[1])


def test_a_draft_vocabulary_chosen_from_a_cache_is_that_of_the_data(root: Path, tmp_path: Path) -> None:
    """In the rows that are cached other ids are frequent. The cache is completed later, the run killed and resumed."""
    options: dict[str, Any] = {"steps": 4, "save": 1, "draft_vocab": 12}
    online = runs.config(root, root / "model", **options, output=str(tmp_path / "online"))
    made = runs.trainer(online)
    out = tmp_path / "cache"
    for count in (1, 4):
        source = runs.trainer(online).source
        write_cache(made.begun.model, made.identity, source, online, out, count, ALONE)  # type: ignore[arg-type]
    offline = runs.config(root, root / "model", **options, cache=str(out), output=str(tmp_path / "offline"))
    begun = runs.trainer(offline)
    cached = torch.cat([batch.ids[batch.loss_mask] for batch, _ in (begun.source.take() for _ in range(4))])
    few = torch.bincount(cached, minlength=97).argsort(descending=True, stable=True)[:12].sort().values
    assert made.vocab is not None
    assert begun.vocab is not None
    assert few.tolist() != made.vocab.tolist() == begun.vocab.tolist()
    made.run()
    killed_after(2, offline)
    runs.trainer(offline).run()
    assert len(runs.losses(online)) == 4
    assert runs.losses(offline) == runs.losses(online)
    lists = [(Path(c.output) / "draft_vocab.json").read_bytes() for c in (online, offline)]
    assert lists[0] == lists[1]


def test_a_cache_without_counts_gets_them_from_its_command(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache"

    def cache(count: int) -> None:
        one = runs.trainer(runs.config(root, root / "model", steps=1, output=str(tmp_path / "none")))
        write_cache(one.begun.model, one.identity, one.source, one.config, out, count, ALONE)  # type: ignore[arg-type]

    cache(2)
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    offline = runs.config(root, root / "model", cache=str(out), draft_vocab=12, output=str(tmp_path / "h"))
    (out / "id-counts.safetensors").unlink()
    with pytest.raises(NextnError, match=r"lacks id-counts\.safetensors"):
        runs.trainer(offline)
    runs.trainer(runs.config(root, root / "model", cache=str(out), output=str(tmp_path / "all")))
    cache(2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == written
    (out / "id-counts.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(NextnError, match=r"id-counts\.safetensors of the cache cannot be read"):
        runs.trainer(offline)
    (out / "cache.json").unlink()
    cache(2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == written, "counts of an unknown cache stay"


def test_a_run_keeps_to_its_ids(root: Path, tmp_path: Path) -> None:
    """Another list under the same path would change the losses."""
    (tmp_path / "ids.json").write_text('{"ids": [3, 5, 7]}')
    options: dict[str, Any] = {"draft_vocab": str(tmp_path / "ids.json"), "output": str(tmp_path / "head")}
    runs.trainer(runs.config(root, root / "model", steps=2, **options)).run()
    (tmp_path / "ids.json").write_text('{"ids": [3, 5, 8]}')
    with pytest.raises(NextnError, match="drafts from other ids"):
        runs.trainer(runs.config(root, root / "model", steps=3, **options))
    (tmp_path / "ids.json").write_text('{"ids": [7, 5, 3]}')
    assert runs.trainer(runs.config(root, root / "model", steps=3, **options)).step.done == 2
