"""Training from cached hidden states is training online, and a cache of something else is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nextn.errors import NextnError
from nextn.train.hidden_cache import CachedSource, write_cache
from nextn.train.processes import Processes
from tests.train import runs

ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    runs.target(folder / "model", "qwen3_5")
    runs.data(folder / "data.jsonl", lines=15, repeat=True)
    return folder


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
    runs.killed_after(3, offline)
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
    with runs.files_of_at_most(1000), pytest.raises(NextnError, match="cannot be written"):
        cache(4, "cut")
    assert not list((tmp_path / "cut").glob(".*"))
    assert cache(4, "cut")["batches"] == cache(4, "whole")["batches"] == 4


def test_damaged_shards_are_written_again_and_no_others(root: Path, tmp_path: Path) -> None:
    """Missing, truncated, of zeros, or with another shard's batches; also by a command that asks for fewer batches."""
    made, out = runs.config(root, root / "model", steps=1, output=str(tmp_path / "head")), tmp_path / "cache"

    def cache(count: int) -> None:
        begun = runs.trainer(made)
        write_cache(begun.begun.model, begun.identity, begun.source, made, out, count, ALONE, shard_bytes=10_000)  # type: ignore[arg-type]

    def shard(number: int) -> Path:
        return out / f"states-{number:05d}.safetensors"

    cache(10)
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    assert len(whole) == 7, "five shards, the facts and the counts"
    inodes = {path.name: path.stat().st_ino for path in out.iterdir()}
    shard(0).unlink()
    shard(1).write_bytes(whole[shard(1).name][:-1])
    shard(3).write_bytes(bytes(len(whole[shard(3).name])))
    shard(4).write_bytes(whole[shard(1).name])
    (out / "id-counts.safetensors").write_bytes(b"\0" * 64)
    offline = runs.config(root, root / "model", cache=str(out), steps=10, output=str(tmp_path / "h"))
    with pytest.raises(NextnError, match=r"states-00000.*run the `nextn cache` command that wrote it again"):
        runs.trainer(offline).run()
    cache(2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    for kept in (shard(2), out / "cache.json"):
        assert kept.stat().st_ino == inodes[kept.name]
    runs.trainer(offline).run()
    shard(2).unlink()
    cache(11)
    assert len(list(out.iterdir())) == 8
    assert shard(2).read_bytes() == whole[shard(2).name]


@pytest.mark.parametrize(
    "change",
    [
        {"shards": []}, {"shards": None}, {"shards": [{}]}, {"state": None}, {"state": {}}, {"batches": 99},
        {"shards": [{"file": "../states-00000.safetensors", "first": 0, "batches": 3}]},
        {"shards": [{"file": "cache.json", "first": 0, "batches": 3}]}, "{",
    ],
)  # fmt: skip
def test_damaged_facts_of_a_cache_are_told(root: Path, tmp_path: Path, change: Any) -> None:
    made = runs.config(root, root / "model", steps=1, output=str(tmp_path / "head"))
    out, begun = tmp_path / "cache", runs.trainer(made)

    def cache() -> dict[str, Any]:
        again = runs.trainer(made)
        return write_cache(again.begun.model, again.identity, again.source, made, out, 3, ALONE)  # type: ignore[arg-type]

    facts = cache()
    (out / "cache.json").write_text(change if isinstance(change, str) else json.dumps(facts | change))
    with pytest.raises(NextnError, match=r"cache\.json is damaged\. Delete .* and write the cache anew"):
        cache()
    with pytest.raises(NextnError, match=r"cache\.json is damaged"):
        CachedSource(out, begun.identity, ALONE)


def test_a_run_goes_on_with_its_cache_under_another_path_and_with_no_other(root: Path, tmp_path: Path) -> None:
    made = runs.config(root, root / "model", steps=1, output=str(tmp_path / "head"))
    for name, count in (("cache", 4), ("other", 3)):
        begun = runs.trainer(made)
        write_cache(begun.begun.model, begun.identity, begun.source, made, tmp_path / name, count, ALONE)  # type: ignore[arg-type]

    def offline(cache: str, steps: int) -> Any:
        return runs.config(
            root, root / "model", steps=steps, data=[], schedule="constant", cache=cache, output=str(tmp_path / "run")
        )

    runs.trainer(offline(str(tmp_path / "cache"), 1)).run()
    (tmp_path / "cache").rename(tmp_path / "moved")
    with pytest.raises(NextnError, match="begun with another cache"):
        runs.trainer(offline(str(tmp_path / "other"), 3))
    runs.trainer(offline(f"{tmp_path}/./moved/", 3)).run()
    assert len(runs.losses(offline(str(tmp_path / "moved"), 3))) == 3


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
    facts = json.loads((tmp_path / "cache" / "cache.json").read_text())
    (tmp_path / "cache" / "cache.json").write_text(json.dumps(facts | {"model": "0"}))
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
    runs.killed_after(2, offline)
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
