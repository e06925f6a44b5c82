"""Checkpoints of a run: head and optimiser through torch.distributed.checkpoint, the rest as JSON beside them.

A checkpoint is a folder ``step-N`` that appears whole or not at all; a run resumes from the newest. ``best-N`` holds
the head alone, as it was when it was accepted best.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        """The JSON of ``step-N``."""
        try:
            facts: dict[str, Any] = json.loads((self.folder / f"step-{step}" / FACTS).read_text())
        except (OSError, ValueError) as error:
            raise _damaged(self.folder / f"step-{step}", error) from None
        return facts

    def load(self, step: int, unroll: HeadUnroll, optimisers: tuple[Optimizer, ...]) -> None:
        """Put ``step-N`` into head and optimisers."""
        head, state = get_model_state_dict(unroll), get_optimizer_state_dict(unroll, optimisers)
        self._read(f"step-{step}", {"head": head, "optimiser": state})
        set_model_state_dict(unroll, head)
        set_optimizer_state_dict(unroll, optimisers, state)

    def load_best(self, step: int, unroll: HeadUnroll) -> None:
        """Put ``best-N`` into the head."""
        head = get_model_state_dict(unroll)
        self._read(f"best-{step}", {"head": head})
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

    def _read(self, name: str, state: dict[str, Any]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(state, checkpoint_id=self.folder / name)
        except (OSError, ValueError, RuntimeError, CheckpointException) as error:
            raise _damaged(self.folder / name, error) from None

    def _steps(self, kind: str) -> list[int]:
        if not self.folder.is_dir():
            return []
        found = (re.fullmatch(rf"{kind}-(\d+)", path.name) for path in self.folder.iterdir())
        return [int(match[1]) for match in found if match]


def _unwritten(path: Path, error: BaseException) -> NextnError:
    """`error`: an OSError lies at its root where this process failed, and nothing that people can read elsewhere."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    root: BaseException | None = error
    while root is not None and not isinstance(root, OSError):
        root = root.__cause__ or root.__context__
    reason = f"{root.strerror or root}" if isinstance(root, OSError) else "the disk may be full"
    return NextnError(
        f"The checkpoint {path} cannot be written ({reason}).",
        "Make room, then run the same command again: it goes on from the newest checkpoint.",
    )


def _damaged(path: Path, error: BaseException) -> NextnError:
    reason = str(error).strip().splitlines()
    return NextnError(
        f"The checkpoint {path} cannot be read ({reason[0][:120] if reason else type(error).__name__}).",
        "Delete it to resume from the one before, or give another output.",
    )
