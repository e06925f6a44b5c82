"""Merge into a base where it lies, by a journal: files are added, index and configs swapped, nothing is rewritten.

Everything new is first written and flushed below ``.nextn-merge`` in the base. Then the journal appears, by a rename:
from there on the merge is only carried forward, step by step, each step a rename that may be done again. A run that
finds a journal completes it; one that finds the folder without a journal removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from nextn.checkpoint.jsonfile import read_json
from nextn.errors import NextnError
from nextn.surgery.plan import Plan, Text
from nextn.surgery.stream import Advance
from nextn.surgery.write import disk_error, flush_folder, place_shard, place_text, quiet

FOLDER = ".nextn-merge"
JOURNAL = "journal.json"


def require_in_place(plan: Plan) -> None:
    """Raises NextnError where a merge needs more than adding and swapping files."""
    if plan.rewritten:
        file, keys = next(iter(plan.rewritten.items()))
        raise NextnError(
            f"{file} holds {len(keys)} tensors of the old head beside the target's, so that it must be written anew.",
            "Merge into a new folder: nextn merge BASE HEAD OUT --replace.",
        )


def write_in_place(plan: Plan, advance: Advance = quiet) -> None:
    """Carry out an in-place plan.

    Raises:
        NextnError: a shard would have to be rewritten, another run is at work, or the disk is full.
    """
    require_in_place(plan)
    base = plan.out
    try:
        with _locked(base):
            if (base / FOLDER).exists():
                raise NextnError(f"An earlier merge into {base} was interrupted.", "Run it again to finish that first.")
            _stage(base, plan, advance)
            _forward(base)
    except OSError as error:
        raise disk_error(error, base / FOLDER) from None


def recover(base: Path) -> Literal["nothing", "completed", "undone"]:
    """Finish what an interrupted run left in a base.

    Raises:
        NextnError: another run is at work, or the journal cannot be carried out.
    """
    if not (base / FOLDER).is_dir():
        return "nothing"
    try:
        with _locked(base):
            if not (base / FOLDER / JOURNAL).is_file():
                shutil.rmtree(base / FOLDER)
                return "undone"
            _forward(base)
            return "completed"
    except OSError as error:
        raise disk_error(error, base / FOLDER) from None


def interrupted(base: Path) -> bool:
    """Whether an in-place merge of this base was cut short."""
    return (base / FOLDER).is_dir()


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


def _stage(base: Path, plan: Plan, advance: Advance) -> None:
    stage = base / FOLDER
    try:
        os.mkdir(stage)
        (shard,) = plan.shards
        hashes = place_shard(stage, shard, advance)
        for text in plan.texts:
            place_text(stage, text, hashes)
        steps: list[dict[str, Any]] = [{"place": f, "bytes": (stage / f).stat().st_size} for f in _placed(plan)]
        steps += [{"remove": file} for file in plan.dropped]
        journal = json.dumps({"version": 1, "facts": dict(plan.facts), "steps": steps}, indent=2)
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
    return [plan.head.file, *(t.file for t in plan.texts)]


def _forward(base: Path) -> None:
    stage = base / FOLDER
    steps = read_json(stage / JOURNAL).get("steps")
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
    os.unlink(stage / JOURNAL)
    shutil.rmtree(stage)
