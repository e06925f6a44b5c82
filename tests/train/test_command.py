"""`nextn train` and `nextn cache` as a user calls them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nextn import cli
from nextn.train import hidden_cache
from nextn.train.config import TrainConfig, load_config
from tests.train import runs

RECIPES = Path(__file__).parents[2] / "recipes"


def call(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    assert (ended.value.code or 0) == code, ended.value.code


@pytest.fixture
def root(tmp_path: Path) -> Path:
    runs.target(tmp_path / "model", "qwen3")
    lines = runs.data(tmp_path / "data.jsonl").read_text().splitlines()
    (tmp_path / "data.jsonl").write_text("\n".join([*lines, "{not json", '{"input_ids": [1, 500]}']) + "\n")
    return tmp_path


def words(root: Path, **values: object) -> list[str]:
    made = runs.config(root, root / "model", **values)
    return [f"{k}={json.dumps(v)}" for k, v in made.model_dump(exclude_none=True).items()]


def test_train_and_cache(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("cache", *words(root, steps=4), "--out", str(root / "cache"), "--json")
    cached = json.loads(capsys.readouterr().out)
    assert cached["batches"] == 4
    assert cached["bytes"] == sum(f.stat().st_size for f in (root / "cache").glob("*.safetensors"))
    call("train", *words(root, steps=4), "--json")
    online = json.loads(capsys.readouterr().out)
    assert online["steps"] == 4
    assert sum(online["data"]["malformed"].values()) == 2
    offline = words(root, steps=4, data=[], cache=str(root / "cache"), output=str(root / "offline"))
    call("train", *offline, "--json")
    assert json.loads(capsys.readouterr().out)["loss"] == online["loss"]
    assert (root / "head" / "report.html").is_file()
    assert any((root / "head" / "logs" / "tensorboard").iterdir())
    call("inspect", str(root / "head"), "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["complete"]
    assert report["heads_found"] == 1


def test_ctrl_c_says_that_a_cache_is_gone_on_with(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kept in (0, 2):
        with monkeypatch.context() as patch:
            patch.setattr(hidden_cache, "_states", raise_interrupt)
            call("cache", *words(root, steps=4), "--out", str(root / "cache"), code=130)
        said = f"stopped after batch {kept}; the same command goes on from there"
        assert said in capsys.readouterr().err.splitlines()
        call("cache", *words(root, steps=2), "--out", str(root / "cache"))
    call("cache", *words(root, steps=4), "--out", str(root / "cache"))
    assert "cache: 4 batches" in capsys.readouterr().out


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_start_that_is_misspelt_is_told_of(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for init, meant in (("natve", "native"), ("Scratch", "scratch"), ("nativ", "native")):
        call("train", f"model={root / 'model'}", f"data={root / 'data.jsonl'}", f"init={init}", code=2)
        assert f"Did you mean {meant}?" in capsys.readouterr().err
    assert load_config(None, ["data=x", "init=org/scratch-head"]).init == "org/scratch-head"


def test_a_finished_run_with_merge_is_run_again(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it merged stays as it is; what it did not, or what changed, is refused, and the head is told of."""
    out, head = root / "merged", root / "head"

    def train(code: int = 0, **values: object) -> str:
        capsys.readouterr()
        call("train", *words(root, **{"steps": 2, "merge": str(out), **values}), code=code)
        told = capsys.readouterr()
        return told.err if code else told.out

    def files() -> dict[str, tuple[bytes, int]]:
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}

    first = train()
    merged = files()
    (out / "notes.txt").write_text("mine")
    assert train() == first
    assert {name: told for name, told in files().items() if name != "notes.txt"} == merged
    refused = train(code=2, steps=3)
    assert f"{out} holds this run's head of 2 steps already, and 3 are asked for." in refused
    assert f"Remove {out}, or give another merge" in refused
    train(steps=3, merge=str(root / "longer"))
    assert train(steps=3, merge=str(root / "longer")).startswith("3 steps")
    shutil.rmtree(out)
    train(steps=3)
    assert train(steps=3).startswith("3 steps")
    for found in (root / "longer", out):
        (found / "config.json").write_text((found / "config.json").read_text() + " ")
        refused = train(code=2, steps=3, merge=str(found))
        assert f"{found} exists already and is not what this run merged; the head is done: {head}." in refused
    shutil.rmtree(out)
    train(steps=3)
    record = json.loads((head / "logs" / "merged.json").read_text())
    record[str(out)]["head"] = "of another export"
    (head / "logs" / "merged.json").write_text(json.dumps(record))
    assert f"the head is done: {head}." in train(code=2, steps=3)
    (head / "logs" / "merged.json").write_text("{")
    assert "is not what this run merged" in train(code=2, steps=3)
    assert "merged exists already" in train(code=2, output=str(root / "other"))


def test_a_cache_is_not_written_among_other_things(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head, a model, a file; what a killed command left is completed, and an empty folder is filled."""

    def contents(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    (root / "other").mkdir()
    (root / "other" / "notes.txt").write_text("mine")
    (root / "other" / "states-00000.safetensors").write_text("mine")
    call("train", *words(root, steps=1))
    for name in ("other", "model", "head", "data.jsonl"):
        before = contents(root)
        capsys.readouterr()
        call("cache", *words(root, steps=1), "--out", str(root / name), code=2)
        assert f"{root / name} " in capsys.readouterr().err
        assert contents(root) == before
    (root / "cache").mkdir()
    call("cache", *words(root, steps=2), "--out", str(root / "cache"))
    whole = contents(root / "cache")
    (root / "cache" / "cache.json").rename(root / "cache" / ".cache.json")
    (root / "cache" / "states-00000.safetensors").rename(root / "cache" / ".states-00000.safetensors")
    call("cache", *words(root, steps=2), "--out", str(root / "cache"))
    assert contents(root / "cache") == whole


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eval": "short.jsonl"}, "No text of the data has"),
        ({"data": ["nothing.jsonl"]}, "no token to predict"),
        ({"data": ["nothing.jsonl"], "draft_vocab": 5}, "no token to predict"),
        ({"draft_vocab": "one.json"}, "has one id"),
        ({"wandb": "heads"}, "wandb is asked for"),
        ({"init": "nowhere"}, "nowhere"),
    ],
)
@pytest.mark.parametrize("there", [None, "folder", "log"])
def test_a_refused_run_leaves_nothing_behind(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    said: str,
    there: str | None,
) -> None:
    """A folder that was there before stays as it was, also with the log of a run that was killed."""
    monkeypatch.chdir(root)
    monkeypatch.setattr("nextn.train.log.find_spec", lambda name: None)
    (root / "short.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n')
    (root / "one.json").write_text('{"ids": [1]}')
    (root / "nothing.jsonl").write_text('{"input_ids": [1]}\n')
    out = root / "deep" / "down" / "head"
    if there is not None:
        out.mkdir(parents=True)
    if there == "log":
        (out / "logs").mkdir()
        (out / "logs" / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        (out / "draft_vocab.json").write_text('{"ids": [1, 2]}')

    def contents() -> dict[str, bytes | None]:
        return {str(p): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}

    before = contents()
    call("train", *words(root, **{"output": str(out), **changes}), code=2)
    assert said in capsys.readouterr().err
    assert contents() == before
    if "data" in changes:
        call("cache", *words(root, **changes), "--out", str(out / "states"), code=2)
        assert contents() == before


def test_lines_for_people(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "run.yaml").write_text("\n".join(w.replace("=", ": ", 1) for w in words(root, steps=2)))
    call("train", str(root / "run.yaml"), "steps=3")
    said = capsys.readouterr()
    assert "step 3/3  loss " in said.err
    assert said.out.startswith("3 steps, ")
    assert "2 malformed lines, not used:\n  1 x " in said.out
    assert said.out.rstrip().endswith(f"head: {root / 'head'}")


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    call("train", "--help-config")
    text = capsys.readouterr().out
    for name, info in TrainConfig.model_fields.items():
        assert f"\n{name} (" in text
        assert str(info.description) in text


def test_errors_are_two_sentences(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["train", "stepps=3"], ["train", str(root / "none.yaml")], ["cache", "data=x"], ["train"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(given)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert len(said.splitlines()) == 2


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_valid(recipe: Path) -> None:
    assert load_config(recipe).steps > 0


def test_the_word_off_is_not_read_as_false(tmp_path: Path) -> None:
    """YAML 1.1 would."""
    (tmp_path / "run.yaml").write_text("data: x.jsonl\nautocast: off\n")
    assert load_config(tmp_path / "run.yaml").autocast == "off"
    assert load_config(None, ["data=x.jsonl", "autocast=off"]).autocast == "off"


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        ("steps=abc", "steps is 'abc'", "Give a whole number at least 1. Optimiser steps."),
        ("steps=true", "steps is 'true'", "Give a whole number at least 1."),
        ("lr=-1", "lr is '-1'", "Give a number above 0"),
        ("unroll=9", "unroll is '9'", "Give a whole number at least 1 and at most 8."),
        ("steps=1.0e+21", "steps is '1e+21'", "at least 1 and at most 1,000,000,000. Optimiser steps."),
        ("save=1000000000000000000000", "save is '1000000000000000000000'", "and at most 1,000,000,000."),
        ("seed=9223372036854775808", "seed is", "and below 9,223,372,036,854,775,808."),
        ("lr=1e300", "lr is '1e300'", "Give a number above 0 and at most 100."),
        ("batch_tokens=1000000001", "batch_tokens is '1000000001'", "at most 1,000,000,000."),
        ("batch_tokens=1000000000", "One forward of batch_tokens = 1,000,000,000 takes over 3,", "raise accumulation"),
        ("accumulation=1000000000", "The rows of a step take 1,200.0 GB of memory, and ", "Lower accumulation = 1,000"),
        ("loss_weights=x", "loss_weights is 'x'", "Give numbers."),
        ("seed=1", "'seed' is given twice", "Keep one"),
        ("device=meta", "There is no device meta", "device=cpu"),
    ],
)
def test_wrong_values_are_told_with_what_is_right(
    root: Path, capsys: pytest.CaptureFixture[str], given: str, what: str, fix: str
) -> None:
    key = given.partition("=")[0]
    kept = [w for w in words(root) if given == "seed=1" or not w.startswith(f"{key}=")]
    call("train", *kept, given, code=2)
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 2
    assert what in said[0]
    assert fix in said[1]


def test_rows_that_no_memory_holds_are_not_cached(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = [w for w in words(root) if not w.startswith("batch_tokens=")]
    call("cache", *kept, "batch_tokens=1000000000", "--out", str(root / "states"), code=2)
    assert "One forward of batch_tokens = 1,000,000,000 takes over 384.0 GB" in capsys.readouterr().err
    assert not (root / "states").exists()
