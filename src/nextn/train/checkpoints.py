"""Checkpoints of a run: head and optimiser through torch.distributed.checkpoint, the rest as JSON beside them.

A checkpoint is a folder ``step-N`` that appears whole or not at all; a run resumes from the newest. ``best-N`` holds
the head alone, as it was when it was accepted best.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from nextn.errors import NextnError
from nextn.train.processes import Processes
from nextn.train.unroll import HeadUnroll

FACTS = "run.json"


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: made when the first is written.
        processes: all of them call each method together.
    """

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes = folder, processes

    def newest(self) -> int | None:
        """Step of the newest checkpoint."""
        return max(self._steps("step"), default=None)

    def save(
        self, step: int, unroll: HeadUnroll, optimisers: tuple[Optimizer, ...], facts: Mapping[str, Any], keep: int
    ) -> None:
        """Write ``step-N`` and drop what is no longer needed.

        Args:
            facts: JSON; ``best_step`` names the best head that must be kept.
            keep: newest checkpoints to keep.
        Raises:
            NextnError: the disk is full or fails; the checkpoints before are kept.
        """
        state = {"head": get_model_state_dict(unroll), "optimiser": get_optimizer_state_dict(unroll, optimisers)}
        self._write(f"step-{step}", state, facts)
        if self.processes.first:
            for leftover in self.folder.glob(".*"):  # of writes that were killed
                shutil.rmtree(leftover)
            for old in sorted(self._steps("step"))[:-keep]:
                shutil.rmtree(self.folder / f"step-{old}")
            wanted = {self.facts(s).get("best_step") for s in self._steps("step")}
            for old in self._steps("best"):
                if old not in wanted:
                    shutil.rmtree(self.folder / f"best-{old}")
        self.processes.wait()

    def save_best(self, step: int, unroll: HeadUnroll) -> None:
        """Write ``best-N``; an earlier run's of the same step is replaced."""
        self._write(f"best-{step}", {"head": get_model_state_dict(unroll)}, {"step": step})

    def facts(self, step: int) -> dict[str, Any]:
        """The JSON of ``step-N``.

        Raises:
            NextnError: it cannot be read.
        """
        try:
            facts: dict[str, Any] = json.loads((self.folder / f"step-{step}" / FACTS).read_text())
        except (OSError, ValueError) as error:
            raise _unreadable(self.folder / f"step-{step}", error, self._instead(step)) from None
        if not isinstance(facts, dict) or not {"config", "data", "tally"} <= set(facts):
            raise _unreadable(self.folder / f"step-{step}", None, self._instead(step))
        return facts

    def load(self, step: int, unroll: HeadUnroll, optimisers: tuple[Optimizer, ...]) -> None:
        """Put ``step-N`` into head and optimisers.

        Raises:
            NextnError: it cannot be read.
        """
        head, state = get_model_state_dict(unroll), get_optimizer_state_dict(unroll, optimisers)
        self._read(f"step-{step}", {"head": head, "optimiser": state}, self._instead(step))
        set_model_state_dict(unroll, head)
        set_optimizer_state_dict(unroll, optimisers, state)

    def load_best(self, step: int, unroll: HeadUnroll) -> None:
        """Put ``best-N`` into the head.

        Raises:
            NextnError: it cannot be read.
        """
        head = get_model_state_dict(unroll)
        last = "The same command with keep_best=false exports the last step instead."
        self._read(f"best-{step}", {"head": head}, last)
        set_model_state_dict(unroll, head)

    def _write(self, name: str, state: dict[str, Any], facts: Mapping[str, Any]) -> None:
        stage, out = self.folder / f".{name}", self.folder / name
        if self.processes.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(stage, ignore_errors=True)
        self.processes.wait()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                save(state, checkpoint_id=stage)
        except (OSError, RuntimeError, CheckpointException) as error:
            if self.processes.first:
                shutil.rmtree(stage, ignore_errors=True)
            raise _unwritten(out, error) from None
        if self.processes.first:
            (stage / FACTS).write_text(json.dumps(facts))
            shutil.rmtree(out, ignore_errors=True)
            os.rename(stage, out)
        self.processes.wait()

    def _read(self, name: str, state: dict[str, Any], instead: str) -> None:
        log = logging.getLogger()  # where `load` tells of missing files, with tracebacks
        heard, log.disabled = log.disabled, True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(state, checkpoint_id=self.folder / name)
        except (Exception, CheckpointException) as error:
            cause = _cause(error)
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise _unreadable(self.folder / name, cause, instead) from None
        finally:
            log.disabled = heard

    def _instead(self, step: int) -> str:
        """What to do where ``step-N`` is damaged."""
        before = max((s for s in self._steps("step") if s < step), default=None)
        then = "begin anew" if before is None else f"resume from step-{before}"
        return f"Delete it to {then}, or give another output."

    def _steps(self, kind: str) -> list[int]:
        if not self.folder.is_dir():
            return []
        found = (re.fullmatch(rf"{kind}-(\d+)", path.name) for path in self.folder.iterdir())
        return [int(match[1]) for match in found if match]


def _unwritten(path: Path, error: BaseException) -> NextnError:
    """`error`: an OSError lies at its root where this process failed, and nothing that people can read elsewhere."""
    root = _system_error(_cause(error))
    reason = f"{root.strerror or root}" if root is not None else "the disk may be full"
    return NextnError(
        f"The checkpoint {path} cannot be written ({reason}).",
        "Make room, then run the same command again: it goes on from the newest checkpoint.",
    )


def _unreadable(path: Path, error: BaseException | None, instead: str) -> NextnError:
    """`instead`: what to do where files are damaged. What `load` says of its files is of no use to anybody."""
    root = _system_error(error)
    if root is None or isinstance(root, FileNotFoundError):
        what = f"The checkpoint {path} cannot be read: a file of it is missing, cut short or overwritten."
        return NextnError(what, instead)
    return NextnError(
        f"The checkpoint {path} cannot be read ({root.strerror or root}).", "Check the disk and the permissions."
    )


def _cause(error: BaseException) -> BaseException:
    """What went wrong, in this process or another."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _system_error(error: BaseException | None) -> OSError | None:
    """At the root of an error."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
