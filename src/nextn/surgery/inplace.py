"""Merge into a base where it lies, by a journal: files are added, index and configs swapped, nothing is rewritten.

Everything new is first written and flushed below ``.nextn-merge`` in the base. Then the journal appears, by a rename:
from there on the merge is only carried forward, step by step, each step a rename that may be done again, and ends with
one rename of the folder itself. A run that finds a journal completes it; one that finds the folder without a journal
removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nextn.checkpoint.jsonfile import read_json
from nextn.checkpoint.source import Checkpoint
from nextn.errors import NextnError
from nextn.surgery.plan import Plan, Text
from nextn.surgery.show import as_json
from nextn.surgery.stream import Advance
from nextn.surgery.write import disk_error, flush_folder, place_shard, place_text, quiet

FOLDER = ".nextn-merge"
JOURNAL = "journal.json"
DONE = ".nextn-merge-done-"
"""With the identity of the head after it: what `FOLDER` is renamed to when every step has been taken."""


def require_in_place(plan: Plan) -> None:
    """Raises NextnError where a merge needs more than adding and swapping files."""
    if plan.rewritten:
        file, keys = next(iter(plan.rewritten.items()))
        raise NextnError(
            f"{file} holds {len(keys)} tensors of the old head beside the target's, so that it must be written anew.",
            "Merge into a new folder: nextn merge BASE HEAD OUT --replace.",
        )


def write_in_place(plan: Plan, advance: Advance = quiet, *, head: str = "") -> None:
    """Carry out an in-place plan.

    Args:
        head: `identity` of the head, for the run that finds this one interrupted.
    Raises:
        NextnError: a shard would have to be rewritten, another run is at work, or the disk is full.
    """
    require_in_place(plan)
    base = plan.out
    try:
        with _locked(base):
            if (base / FOLDER).exists():
                raise NextnError(f"An earlier merge into {base} was interrupted.", "Run it again to finish that first.")
            _stage(base, plan, advance, head)
            _forward(base)
    except OSError as error:
        raise disk_error(error, base / FOLDER) from None


@dataclass(frozen=True)
class Recovered:
    """What was done about an interrupted run.

    Attributes:
        state: ``completed`` where its journal was carried out now, or had been and only its folder was left.
        head: the identity of the head that it placed.
        plan: the plan that it carried out, as printed; {} where that is no longer known.
    """

    state: Literal["nothing", "completed", "undone"]
    head: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)


def recover(base: Path) -> Recovered:
    """Finish what an interrupted run left in a base.

    Raises:
        NextnError: another run is at work, or the journal cannot be carried out.
    """
    if not interrupted(base):
        return Recovered("nothing")
    try:
        with _locked(base):
            if not (base / FOLDER).is_dir():
                return _clear_done(base)
            if not (base / FOLDER / JOURNAL).is_file():
                shutil.rmtree(base / FOLDER)
                return Recovered("undone")
            _forward(base, clear=False)
            return _clear_done(base)
    except OSError as error:
        raise disk_error(error, base / FOLDER) from None


def interrupted(base: Path) -> bool:
    """Whether an in-place merge of this base was cut short."""
    return (base / FOLDER).is_dir() or next(base.glob(f"{DONE}*"), None) is not None


def identity(head: Checkpoint) -> str:
    """Tells two heads apart without reading weights: what the headers list, and the files' sizes and times."""
    lines = [f"{t.key} {t.dtype} {t.shape} {t.file} {t.start}" for t in head.tensors.values()]
    if head.remote is not None:
        lines.append(f"{head.remote.repo} {head.remote.commit}")
    elif head.root is not None:
        stats = ((name, (head.root / name).stat()) for name in head.files)
        lines += [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NextnError(f"Another merge into {base} is at work.", "Wait for it to end.") from None
        yield
    finally:
        os.close(folder)


def _stage(base: Path, plan: Plan, advance: Advance, head: str) -> None:
    stage = base / FOLDER
    try:
        os.mkdir(stage)
        (shard,) = plan.shards
        hashes = place_shard(stage, shard, advance)
        for old, new in plan.moved.items():
            os.link(base / old, stage / new)
        for text in plan.texts:
            place_text(stage, text, hashes)
        steps: list[dict[str, Any]] = [{"place": f, "bytes": (stage / f).stat().st_size} for f in _placed(plan)]
        steps += [{"remove": file} for file in (*plan.moved, *plan.dropped)]
        journal = json.dumps({"version": 2, "head": head, "plan": as_json(plan), "steps": steps}, indent=2)
        place_text(stage, Text(f"{JOURNAL}.new", journal.encode()), {})
        flush_folder(stage)
        os.rename(stage / f"{JOURNAL}.new", stage / JOURNAL)
        flush_folder(stage)
        flush_folder(base)
    except BaseException:
        if not (stage / JOURNAL).exists():
            shutil.rmtree(stage, ignore_errors=True)
        raise


def _placed(plan: Plan) -> list[str]:
    """The head first, so that no index ever names a file that is not there; the index last."""
    return [plan.head.file, *plan.moved.values(), *(t.file for t in plan.texts)]


def _forward(base: Path, *, clear: bool = True) -> None:
    """Carry out the journal. The rename of its folder ends the merge; `clear` removes that folder too."""
    stage = base / FOLDER
    journal = read_json(stage / JOURNAL)
    steps = journal.get("steps")
    for step in steps if isinstance(steps, list) else []:
        if "place" in step:
            file = step["place"]
            if (stage / file).exists():
                os.replace(stage / file, base / file)
            elif not (base / file).is_file() or (base / file).stat().st_size != step["bytes"]:
                raise NextnError(
                    f"The journal in {stage} places {file}, which is gone.",
                    "Restore the base from its source; the interrupted merge cannot be completed.",
                )
        elif os.path.lexists(base / step["remove"]):
            os.unlink(base / step["remove"])
    flush_folder(base)
    os.rename(stage, base / f"{DONE}{journal.get('head', '')}")
    if clear:
        _clear_done(base)


def _clear_done(base: Path) -> Recovered:
    """Remove the folders of merges that ended; says of the last which head it placed, by the folder's name."""
    out = Recovered("nothing")
    for folder in sorted(base.glob(f"{DONE}*")):
        path = folder / JOURNAL
        plan = read_json(path).get("plan") if path.is_file() else None
        out = Recovered("completed", folder.name.removeprefix(DONE), plan if isinstance(plan, dict) else {})
        shutil.rmtree(folder)
    return out
