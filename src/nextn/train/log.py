"""Write down a run as it goes: ``log.jsonl``, TensorBoard, Weights & Biases where asked for, and lines for people.

Records of ``log.jsonl``: ``{"step", "loss", "loss_by_step", "lr", "gradient", "tokens", "tokens_per_second", "time"}``
and ``{"step", "eval": {...}}``. `tokens` counts from the start of training, `time` in seconds of all its parts.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from nextn.errors import NextnError
from nextn.train.config import TrainConfig

FILE = "log.jsonl"
Entry = tuple[dict[str, Any], str, dict[str, float]]
"""A record, and the group, names and values of its curves."""


class RunLog:
    """A run's log. Only the first process has one that writes.

    Nothing is on disk before `open`, so that a run that is refused leaves nothing: records until then are held.

    Args:
        folder: made if need be.
        config: of the run.
        begun: steps already done by earlier parts of this run; records past it are dropped.
        quiet: print no lines.
    Raises:
        NextnError: ``wandb`` is asked for and not installed.
    """

    def __init__(self, folder: Path, config: TrainConfig, begun: int, *, quiet: bool) -> None:
        if config.wandb is not None and find_spec("wandb") is None:
            raise NextnError("wandb is asked for and not installed.", "Install it, or leave the key out.")
        self.folder, self.config, self.begun, self.quiet = folder, config, begun, quiet
        self.steps = config.steps
        self._held: list[Entry] = []
        self._file: TextIO | None = None
        self._board: Any = None
        self._run: Any = None

    @property
    def opened(self) -> bool:
        return self._file is not None

    def open(self) -> None:
        """Begin to write, with what was held."""
        from torch.utils.tensorboard import SummaryWriter

        folder, begun = self.folder, self.begun
        folder.mkdir(parents=True, exist_ok=True)
        kept = [r for r in read_log(folder) if r["step"] <= begun] if begun else []
        (folder / FILE).write_text("".join(json.dumps(r) + "\n" for r in kept))
        self._file = (folder / FILE).open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=begun + 1 if begun else None)
        if self.config.wandb is not None:
            import wandb

            self._run = wandb.init(
                project=self.config.wandb,
                dir=str(folder),
                config=self.config.model_dump(),
                id=_run_id(folder, begun),
                resume="allow",
            )
        for entry in self._held:
            self._note(*entry)
        self._held.clear()

    def step(self, record: dict[str, Any]) -> None:
        """One record of training; keys as in the file's description."""
        flat = {"loss": record["loss"], "lr": record["lr"], "tokens_per_second": record["tokens_per_second"]}
        flat |= {f"loss_step_{k}": v for k, v in enumerate(record["loss_by_step"], 1) if v is not None}
        self._note(record, "train", flat)
        by_step = " ".join("-" if v is None else f"{v:.3f}" for v in record["loss_by_step"])
        self.say(
            f"step {record['step']}/{self.steps}  loss {record['loss']:.4f} ({by_step})  "
            f"lr {record['lr']:.1e}  {record['tokens_per_second']:,.0f} tokens/s"
        )

    def evaluation(self, step: int, figures: dict[str, Any], limited: dict[str, Any] | None = None) -> None:
        """One evaluation: what `Evaluation.as_json` holds; `limited`, the same head drafting from the run's ids."""
        record = {"step": step, "eval": figures} | ({"limited": limited} if limited is not None else {})
        flat = {"accept_length": figures["accept_length"]}
        flat |= {f"acceptance_{i}": v for i, v in enumerate(figures["acceptance"], 1)}
        self._note(record, "eval", flat)
        by_position = " ".join(f"{v:.3f}" for v in figures["acceptance"])
        ids = f", {limited['accept_length']:.3f} from this run's ids" if limited is not None else ""
        self.say(f"step {step}/{self.steps}  accept length {figures['accept_length']:.3f} ({by_position}){ids}")

    def say(self, line: str) -> None:
        """A line for people."""
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Flush everything."""
        if self._file is None:
            return
        self._file.close()
        self._board.close()
        if self._run is not None:
            self._run.finish()

    def _note(self, record: dict[str, Any], group: str, values: dict[str, float]) -> None:
        """A record of the file, and the curves that it gives."""
        if self._file is None:
            self._held.append((record, group, values))
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        step = record["step"]
        for name, value in values.items():
            self._board.add_scalar(f"{group}/{name}", value, step)
        if self._run is not None:
            self._run.log({f"{group}/{name}": value for name, value in values.items()}, step=step)


def _run_id(folder: Path, begun: int) -> str:
    """Of the run at Weights & Biases, so that a run that is resumed here goes on there."""
    path = folder / "wandb-id"
    if not begun or not path.is_file():
        path.write_text(uuid4().hex)
    return path.read_text()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line that a kill cut short is left out."""
    path = folder / FILE
    records = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records.append(record)
    return records
