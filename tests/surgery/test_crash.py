"""A merge that is killed before any of its writes, or whose disk fills up at any, leaves OUT whole or absent.

Each run is a process of its own, forked from one that has imported everything, so that every write can be tried.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import nextn.surgery.command  # noqa: F401  (imported once, before the forks)
from nextn import cli
from tests.fixtures import HEAD_SHARD, TRUNK_SHARD, checkpoint
from tests.surgery.builder import digest, headless, read, tiny_qwen3_5, write
from tests.surgery.faults import inject


def run(kind: str, at: int, arguments: list[str]) -> tuple[int, str]:
    """Fork, inject, run. Returns (exit status, or minus the signal; what was printed)."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        text = io.StringIO()
        try:
            os.close(readable)
            count = inject(kind, at)
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                cli.main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            said = text.getvalue()[-50_000:] + f"\ncalls {count[0]}"
            kind = "over"
            sys.__stdout__.flush() if sys.__stdout__ else None
            with os.fdopen(writable, "w") as pipe:
                pipe.write(said)
            os._exit(code)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), said


def calls(said: str) -> int:
    match = re.search(r"calls (\d+)", said)
    assert match
    return int(match[1])


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A folder with a base whose old head shares a shard with the target, and a donor."""
    folder = checkpoint(tiny_qwen3_5())
    moved = list(folder.shards[HEAD_SHARD])[:3]
    folder.shards[TRUNK_SHARD] |= {k: folder.shards[HEAD_SHARD].pop(k) for k in moved}
    write(folder, tmp_path / "base", 1)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    write(checkpoint(tiny_qwen3_5()), tmp_path / "donor", 2)
    return tmp_path


def _sweep(stage: Path, arguments: list[str], after: Callable[[int, int, str], None], kinds: tuple[str, ...]) -> None:
    code, said = run("count", 0, arguments)
    assert code == 0, said
    total = calls(said)
    assert total > 15
    shutil.rmtree(stage / "out", ignore_errors=True)
    for kind in kinds:
        for at in range(1, total + 1):
            code, said = run(kind, at, arguments)
            assert code == -9 if kind == "kill" else code in (0, 2), (kind, at, said)
            after(at, code, said)
            for leftover in stage.glob(".out.nextn-*"):  # so that sweeping it does not shift the count
                shutil.rmtree(leftover)


@pytest.mark.parametrize("link", ["hard", "symlink", "copy"])
def test_out_is_whole_or_absent_whenever_the_process_dies_or_the_disk_is_full(stage: Path, link: str) -> None:
    arguments = ["merge", str(stage / "base"), str(stage / "donor"), str(stage / "out"), "--replace", "--link", link]
    assert run("count", 0, arguments)[0] == 0
    whole = digest(stage / "out")
    base, donor = digest(stage / "base"), digest(stage / "donor")
    shutil.rmtree(stage / "out")
    seen = {"absent": 0, "whole": 0}

    def after(at: int, code: int, said: str) -> None:
        assert digest(stage / "base") == base, at
        assert digest(stage / "donor") == donor, at
        there = os.path.lexists(stage / "out")
        if there:
            assert digest(stage / "out") == whole, at
            shutil.rmtree(stage / "out")
        seen["whole" if there else "absent"] += 1
        if code == 2:
            assert "is full; nothing was changed" in said
            assert not there, "an error was reported and OUT is there"
            assert [p.name for p in stage.iterdir() if p.name.startswith(".")] == []

    _sweep(stage, arguments, after, ("kill", "full") if link == "hard" else ("kill",))
    assert seen["absent"] > 20
    assert seen["whole"] >= 1
    # The next run sweeps away what the killed ones left, and does its work.
    run("kill", 12, arguments)
    assert [p.name for p in stage.iterdir() if p.name.startswith(".out.nextn-")]
    assert run("count", 0, arguments)[0] == 0
    assert sorted(p.name for p in stage.iterdir()) == ["base", "donor", "out"]
    assert digest(stage / "out") == whole


def test_a_neighbour_at_work_is_not_swept_away(stage: Path) -> None:
    import fcntl

    arguments = ["merge", str(stage / "base"), str(stage / "donor"), str(stage / "out"), "--replace"]
    run("kill", 12, arguments)
    (leftover,) = [p for p in stage.iterdir() if p.name.startswith(".out.nextn-")]
    held = os.open(leftover, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert run("count", 0, arguments)[0] == 0
    assert leftover.is_dir()
    os.close(held)
    shutil.rmtree(stage / "out")
    assert run("count", 0, arguments)[0] == 0
    assert not leftover.exists()


def test_an_extraction_is_whole_or_absent_too(stage: Path) -> None:
    arguments = ["extract", str(stage / "donor"), str(stage / "out")]
    assert run("count", 0, arguments)[0] == 0
    whole = digest(stage / "out")
    shutil.rmtree(stage / "out")

    def after(at: int, code: int, said: str) -> None:
        if os.path.lexists(stage / "out"):
            assert digest(stage / "out") == whole
            shutil.rmtree(stage / "out")

    _sweep(stage, arguments, after, ("kill", "full"))


@pytest.mark.parametrize("old", [False, True])
def test_in_place_is_completed_or_undone_by_the_next_run(tmp_path: Path, old: bool) -> None:
    """Killed anywhere, the base is as it was or as it should be after one more run, and readable in between."""
    pristine = tmp_path / "pristine"
    write(checkpoint(tiny_qwen3_5()) if old else headless(tiny_qwen3_5(mtp=0)), pristine, 1)
    write(checkpoint(tiny_qwen3_5()), tmp_path / "donor", 2)
    base = tmp_path / "base"
    arguments = ["merge", str(base), str(tmp_path / "donor"), "--in-place", *(["--replace"] if old else [])]
    before = digest(pristine)

    def fresh() -> None:
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(pristine, base)

    fresh()
    code, said = run("count", 0, arguments)
    assert code == 0, said
    total, done = calls(said), digest(base)
    assert done != before
    outcomes = {"undone": 0, "completed": 0}
    for kind in ("kill", "full"):
        for at in range(1, total + 1):
            fresh()
            code, said = run(kind, at, arguments)
            assert code in (-9, 0, 2), said
            now = {k: v for k, v in digest(base).items() if not k.startswith(".nextn-merge")}
            trunk = {k: v for k, v in now.items() if k in (TRUNK_SHARD,)}
            assert trunk == {k: before[k] for k in trunk}
            assert read(base), "the index names a file that is not there"
            if code == 2:
                assert now == before or (base / ".nextn-merge" / "journal.json").exists(), (at, said)
            code, said = run("count", 0, arguments)
            if code == 0 and digest(base) == done:
                outcomes["completed" if "completed the interrupted" in said else "undone"] += 1
            else:
                # The first run had ended its work: the second finds the head there, or replaces it by itself.
                assert old or "head already" in said, (kind, at, said)
            assert not (base / ".nextn-merge").exists()
            assert len(read(base)) == len(read(pristine)) + (0 if old else 15)
    assert outcomes["undone"] > 5
    assert outcomes["completed"] > 3


def test_hard_links_across_file_systems_are_explained(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    folder = stage / "plain"
    write(headless(tiny_qwen3_5()), folder, 1)
    code, said = run("count", 0, ["merge", str(folder), str(stage / "donor"), str(stage / "out")])
    assert code == 2
    assert "another file system" in said
    assert "--link symlink" in said
    assert not (stage / "out").exists()
    assert run("count", 0, ["merge", str(folder), str(stage / "donor"), str(stage / "out"), "--link", "copy"])[0] == 0


@pytest.fixture
def halfway(stage: Path) -> tuple[Path, list[str]]:
    """A base in which an in-place merge of `stage/donor` died after its journal was written, and the command."""
    shutil.rmtree(stage / "base")
    write(headless(tiny_qwen3_5()), stage / "base", 1)
    arguments = ["merge", str(stage / "base"), str(stage / "donor"), "--in-place"]
    for at in range(1, 60):
        run("kill", at, arguments)
        if (stage / "base" / ".nextn-merge" / "journal.json").exists():
            return stage, arguments
        assert not list((stage / "base").glob(".nextn-merge-done-*"))
        shutil.rmtree(stage / "base")
        write(headless(tiny_qwen3_5()), stage / "base", 1)
    raise AssertionError("no journal was ever written")


def test_a_completed_merge_reports_like_any_other(halfway: tuple[Path, list[str]]) -> None:
    stage, arguments = halfway
    code, said = run("count", 0, [*arguments, "--json"])
    assert code == 0, said
    value = json.loads(said[: said.rindex("\ncalls")])
    assert (value["recovered"], value["written"], value["tensors"]) == (True, True, 15)
    assert value["head"] == str(stage / "donor")
    assert {t["key"] for t in value["head_tensors"]} == {k for k in read(stage / "base") if k.startswith("mtp.")}
    assert not list((stage / "base").glob(".nextn-merge*"))


def test_another_head_than_the_interrupted_one_is_not_passed_over(halfway: tuple[Path, list[str]]) -> None:
    stage, arguments = halfway
    write(checkpoint(tiny_qwen3_5()), stage / "other", 3)
    asked = [a.replace(str(stage / "donor"), str(stage / "other")) for a in arguments]
    code, said = run("count", 0, asked)
    assert code == 2
    assert f"merge of {stage / 'donor'} into" in said
    assert f"{stage / 'other'} was not placed" in said
    assert read(stage / "base")["mtp.fc.weight"] == read(stage / "donor")["mtp.fc.weight"]
    assert run("count", 0, [*asked, "--replace"])[0] == 0
    assert read(stage / "base")["mtp.fc.weight"] == read(stage / "other")["mtp.fc.weight"]


def test_a_merge_that_died_while_clearing_up_is_known_to_be_complete(halfway: tuple[Path, list[str]]) -> None:
    stage, arguments = halfway
    shutil.rmtree(stage / "base")
    seen = 0
    for at in range(1, 80):
        write(headless(tiny_qwen3_5()), stage / "base", 1)
        code, _ = run("kill", at, arguments)
        if code == 0:
            break
        if list((stage / "base").glob(".nextn-merge-done-*")):
            seen += 1
            code, said = run("count", 0, arguments)
            assert (code, "completed the interrupted merge" in said) == (0, True), said
            assert len(read(stage / "base")) > 15
        shutil.rmtree(stage / "base")
    assert seen >= 2


def test_a_lone_model_safetensors_becomes_a_shard_in_place(stage: Path) -> None:
    """At every moment the base can be read, and afterwards through its index alone."""
    folder = headless(tiny_qwen3_5())
    folder.shards = {"model.safetensors": folder.shards[TRUNK_SHARD] | folder.shards[HEAD_SHARD]}
    pristine = write(folder, stage / "pristine", 1)
    base = stage / "lone"
    arguments = ["merge", str(base), str(stage / "donor"), "--in-place"]
    trunk = read(pristine)
    wanted = {**trunk, **{k: v for k, v in read(stage / "donor").items() if k.startswith("mtp.")}}
    for at in range(1, 80):
        shutil.copytree(pristine, base)
        code, said = run("kill", at, arguments)
        if code == 0:
            break
        if (base / "model.safetensors.index.json").exists():
            assert read(base) == wanted
        else:
            assert (base / "model.safetensors").exists()
        code, said = run("count", 0, arguments)
        assert code == 0 or "head already" in said, said
        assert read(base) == wanted
        assert sorted(p.name for p in base.glob("*.safetensors")) == [TRUNK_SHARD, HEAD_SHARD]
        assert not list(base.glob(".nextn-merge*"))
        shutil.rmtree(base)
    else:
        raise AssertionError("never ended by itself")
