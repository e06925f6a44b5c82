"""The ids that a head was trained to draft go where the head goes, and whatever drafts with it uses them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nextn import cli, generate, load
from nextn.engine.engine import Engine
from nextn.errors import NextnError
from nextn.train import local_answers
from nextn.train.evaluate import evaluate
from nextn.train.packing import Document, pack
from tests.oracle.checkpoints import make_checkpoint
from tests.train import runs

IDS = sorted(range(0, 97, 5))
LIST = "draft_vocab.json"


def call(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    assert ended.value.code in (0, None), ended.value.code


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, data, and a head trained over `IDS`, merged as well."""
    folder = tmp_path_factory.mktemp("drafting")
    runs.target(folder / "model", "qwen3_5")
    runs.data(folder / "data.jsonl", repeat=True)
    (folder / "ids.json").write_text(json.dumps({"ids": IDS}))
    made = runs.config(folder, folder / "model", draft_vocab=str(folder / "ids.json"), merge=str(folder / "merged"))
    runs.trainer(made).run()
    return folder


def ids_of(folder: Path) -> list[int]:
    found: list[int] = json.loads((folder / LIST).read_text())["ids"]
    return found


def drafted(model: Any, **options: Any) -> set[int]:
    """Ids that the engine's head proposes over a few prompts."""
    results = generate(model, [[p, 3, 5] for p in range(8)], max_tokens=24, ignore_eos=True, **options)
    return {d for r in results for step in r.draft_rounds for d in step.drafts}


def test_decoding_drafts_these_ids_alone(root: Path) -> None:
    for given in ({"source": root / "model", "head": root / "head"}, {"source": root / "merged"}):
        model = load(**given, dtype="float64")
        assert drafted(model) <= set(IDS)
        assert not drafted(model, draft_vocab="full") <= set(IDS)
        assert drafted(model, draft_vocab=[2, 3]) <= {2, 3}
    prompt = [4, 3, 5]
    text = {tuple(generate(model, prompt, draft_vocab=v).tokens) for v in (None, "full", [2])}
    assert text == {tuple(generate(model, prompt, draft_tokens=0).tokens)}


def test_training_goes_on_over_these_ids(root: Path, tmp_path: Path) -> None:
    """A head that names its ids is trained over them again, unless others are asked for."""

    def listed(name: str, **options: Any) -> list[int] | None:
        made = runs.config(root, root / "model", steps=1, output=str(tmp_path / name), **options)
        runs.trainer(made).run()
        return ids_of(tmp_path / name) if (tmp_path / name / LIST).is_file() else None

    assert listed("path", init=str(root / "head")) == IDS
    assert listed("full", init=str(root / "head"), draft_vocab="full") is None
    assert len(listed("most", init=str(root / "head"), draft_vocab=7) or []) == 7
    assert listed("scratch", init="scratch") is None
    made = runs.config(root, root / "merged", steps=1, output=str(tmp_path / "native"))
    runs.trainer(made).run()
    assert ids_of(tmp_path / "native") == IDS


def test_a_folder_stands_for_its_list_and_coverage_is_told(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = f"data={root / 'data.jsonl'}", f"output={tmp_path / 'a'}"
    given = [data, f"model={root / 'model'}", "steps=2", "batch_tokens=512", "max_length=32", "device=cpu"]
    call("train", *given, output, f"draft_vocab={root / 'head'}")
    assert ids_of(tmp_path / "a") == IDS
    assert "draft vocabulary: 20 ids, " in capsys.readouterr().err
    few = json.loads((root / "data.jsonl").read_text().splitlines()[0])["input_ids"][:2]
    (tmp_path / "few.json").write_text(json.dumps({"ids": few}))
    call("train", *given, f"output={tmp_path / 'b'}", f"draft_vocab={tmp_path / 'few.json'}")
    assert ", too little to draft from" in capsys.readouterr().err
    with pytest.raises(NextnError, match="there is no file"):
        runs.trainer(runs.config(root, root / "model", output=str(tmp_path / "c"), draft_vocab="nowhere"))


def test_regenerate_drafts_these_ids(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Engine] = []

    def recorded(*given: Any, **options: Any) -> Engine:
        made.append(Engine(*given, **options))
        return made[-1]

    monkeypatch.setattr(local_answers, "Engine", recorded)
    for folder in (root / "merged", root / "model"):
        assert not list(local_answers.answer_locally(load(folder), [], at_once=1, options={}))
    assert made[0].vocab is not None
    assert made[0].vocab.ids.tolist() == IDS
    assert made[1].vocab is None


def test_a_head_without_a_list_is_not_held_to_the_targets(root: Path) -> None:
    """Over the merged checkpoint, which has a list for its own head, another head drafts from all ids."""
    model = load(root / "merged", head=root / "model", dtype="float64")
    assert not drafted(model) <= set(IDS)
    assert load(root / "merged", mtp=False).draft_ids is None
    with pytest.raises(NextnError, match="draft_vocab is 'all'"):
        drafted(model, draft_vocab="all")


def test_eval_judges_these_ids(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {}
    (tmp_path / "others.txt").write_text("1 2 3")
    for name, words in (
        ("own", []), ("full", ["--draft-vocab", "full"]), ("others", ["--draft-vocab", str(tmp_path / "others.txt")]),
        ("file", ["--draft-vocab", str(root / "head" / LIST)]),
    ):  # fmt: skip
        common = ["--head", str(root / "head"), "--data", str(root / "data.jsonl"), "--dtype", "float64", "--json"]
        call("eval", str(root / "model"), *common, "--decode", "--decode-prompts", "6", "--max-tokens", "8", *words)
        found[name] = json.loads(capsys.readouterr().out)
    model = load(root / "model", head=root / "head", dtype="float64")
    lines = [json.loads(line)["input_ids"] for line in (root / "data.jsonl").read_text().splitlines()]
    text = [pack([Document(d, [True] * len(d)) for d in lines])]
    for name, ids in (("own", IDS), ("full", None), ("others", [1, 2, 3]), ("file", IDS)):
        chosen = torch.tensor(ids) if ids else None
        wanted = evaluate(model.target, text, draft_tokens=3, draft_ids=chosen).as_json()
        assert found[name]["acceptance"] == wanted["acceptance"]
        assert found[name]["draft_vocab"] == (len(ids) if ids else None)
    assert found["own"]["acceptance"] != found["full"]["acceptance"] != found["others"]["acceptance"]
    assert found["own"]["decode"] == found["file"]["decode"] != found["full"]["decode"]


def test_generate_takes_the_word(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for name, words in (("own", []), ("full", ["--draft-vocab", "full"])):
        call("generate", str(root / "merged"), "--prompt-ids", "4,3,5", "--ignore-eos", "--dtype", "float64",
             "--max-tokens", "48", "--json", *words)  # fmt: skip
        found[name] = json.loads(capsys.readouterr().out)
    model = load(root / "merged", dtype="float64")
    for name, asked in (("own", IDS), ("full", None)):
        wanted = generate(model, [4, 3, 5], ignore_eos=True, max_tokens=48, draft_vocab=asked or "full")
        assert (found[name]["rounds"], found[name]["tokens"]) == (wanted.rounds, wanted.tokens)


def test_merge_and_extract_keep_the_list(root: Path, tmp_path: Path) -> None:
    assert ids_of(root / "head") == ids_of(root / "merged") == IDS
    call("extract", str(root / "merged"), str(tmp_path / "taken"))
    assert ids_of(tmp_path / "taken") == IDS
    call("extract", str(root / "model"), str(tmp_path / "plain"))
    assert not (tmp_path / "plain" / LIST).exists()
    call("merge", str(root / "model"), str(tmp_path / "taken"), str(tmp_path / "again"), "--replace")
    assert ids_of(tmp_path / "again") == IDS


def test_the_list_of_a_replaced_head_goes(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("merge", str(root / "merged"), str(root / "model"), str(tmp_path / "out"), "--replace", "--json")
    assert json.loads(capsys.readouterr().out)["files"]["left_out"][LIST] == "lists the ids of the old head"
    assert not (tmp_path / "out" / LIST).exists()
    assert ids_of(root / "merged") == IDS
    shutil.copytree(root / "merged", tmp_path / "here")
    call("merge", str(tmp_path / "here"), str(root / "model"), "--in-place", "--replace")
    assert not (tmp_path / "here" / LIST).exists()
    call("merge", str(tmp_path / "here"), str(root / "head"), "--in-place", "--replace")
    assert ids_of(tmp_path / "here") == IDS
    assert load(tmp_path / "here").draft_ids == IDS


def test_inspect_says_so(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def finding(folder: Path) -> tuple[str, str] | None:
        call("inspect", str(folder), "--json")
        found = json.loads(capsys.readouterr().out)["findings"]
        return next(((f["severity"], f["message"]) for f in found if f["code"] == "draft-vocab"), None)

    assert finding(root / "model") is None
    for folder in (root / "head", root / "merged"):
        said = finding(folder)
        assert said is not None
        assert said[0] == "info"
        assert f"{len(IDS)} of 97 ids" in said[1]
    shutil.copytree(root / "merged", tmp_path / "m")
    for content, match in (('{"ids": [4000]}', "names id 4000"), ('{"ids": "all"}', "lists no token ids")):
        (tmp_path / "m" / LIST).write_text(content)
        said = finding(tmp_path / "m")
        assert said is not None
        assert said[0] == "warning"
        assert match in said[1]


@pytest.mark.parametrize(
    ("content", "match", "act"),
    [
        ('{"ids": [1.5]}', "lists no token ids", lambda folder: load(folder)),
        ('{"ids": []}', "lists no token ids", lambda folder: load(folder)),
        ('{"ids": [4000]}', "names id 4000", lambda folder: generate(load(folder), [1, 2])),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(
    root: Path, tmp_path: Path, content: str, match: str, act: Callable[[Path], object]
) -> None:
    shutil.copytree(root / "merged", tmp_path / "m")
    (tmp_path / "m" / LIST).write_text(content)
    with pytest.raises(NextnError, match=match):
        act(tmp_path / "m")


def test_merge_refuses_the_ids_of_another_model(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root / "head", tmp_path / "head", ignore=shutil.ignore_patterns("checkpoints", "logs"))
    (tmp_path / "head" / LIST).write_text('{"ids": [1, 97]}')
    with pytest.raises(SystemExit) as ended:
        cli.main(["merge", str(root / "model"), str(tmp_path / "head"), str(tmp_path / "out"), "--replace"])
    assert ended.value.code == 2
    assert "names id 97, and the base has 97" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_output_folder_lists_what_its_head_drafts(root: Path, tmp_path: Path) -> None:
    """A list that an earlier start left goes; a refused start leaves the list of the run that is there."""
    bare = make_checkpoint(tmp_path / "model", "qwen3", seed=1)
    runs.data(tmp_path / "data.jsonl", repeat=True)
    runs.trainer(runs.config(tmp_path, bare, draft_vocab=7, steps=1)).run()
    shutil.rmtree(tmp_path / "head" / "checkpoints")
    assert len(ids_of(tmp_path / "head")) == 7
    runs.trainer(runs.config(tmp_path, bare, steps=2)).run()
    assert not (tmp_path / "head" / LIST).exists()
    with pytest.raises(NextnError, match="another draft_vocab"):
        runs.trainer(runs.config(tmp_path, bare, steps=2, draft_vocab=7))
    assert not (tmp_path / "head" / LIST).exists()
