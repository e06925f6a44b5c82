"""A training run from its configuration to the head folder: load, steps, evaluations, checkpoints, export."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextn.checkpoint.draft_ids import DRAFT_IDS, listed_ids
from nextn.checkpoint.jsonfile import read_json
from nextn.checkpoint.source import Checkpoint
from nextn.errors import NextnError
from nextn.models.config import decoder_config
from nextn.models.decoder import Decoder
from nextn.models.load import Progress
from nextn.surgery.write import refuse_existing
from nextn.train.ahead import Ahead
from nextn.train.checkpoints import Checkpoints
from nextn.train.config import ONE_ID, RUN_ONLY, TrainConfig
from nextn.train.documents import LineReader
from nextn.train.evaluate import evaluate, share
from nextn.train.export import merge_head, merged_head, place_draft_ids, write_head
from nextn.train.hidden_cache import CachedSource, require_settings
from nextn.train.identity import target_identity
from nextn.train.lock import held
from nextn.train.log import FILE, RunLog
from nextn.train.losses import LossSpec
from nextn.train.packing import PackedBatch
from nextn.train.processes import Processes
from nextn.train.report import write_report
from nextn.train.room import require_room
from nextn.train.shard import gathered, shard
from nextn.train.source import DataSource, Source, frequent_ids, held_out
from nextn.train.start import Start, open_target, start, target_dtype
from nextn.train.step import HeadStep, Item, head_is_cast
from nextn.train.stop import Asked, asked_to_stop
from nextn.train.unroll import require_layers

MERGES = "merged.json"
"""Beside the log: the folders that the run merged its head into."""
LEAST_COVERAGE = 0.5
"""Share of the tokens in the draft vocabulary below which a run warns."""
MakeReader = Callable[[TrainConfig, Checkpoint], LineReader]


@dataclass
class Tally:
    """What a run has done so far; saved with its checkpoints.

    Attributes:
        tokens: of documents, over all processes and steps.
        seconds: of training and evaluating, over all parts of the run.
        loss: of the last step.
        before: evaluation before the first step, of a head that was there as it drafted then.
        limited: the same head drafting from this run's ids, where it drafted others.
        best, best_step: highest accept length after a step, and which.
        last: the newest evaluation.
    """

    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None
    before: dict[str, Any] | None = None
    limited: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    best_step: int | None = None
    last: dict[str, Any] | None = field(default=None)


class Trainer:
    """One run. Made on every process; `run` ends with the head folder written.

    Args:
        config: of the run.
        processes: which this is.
        make_reader: reads data lines for a target.
        quiet: print no lines.
        progress: of loading.
    Raises:
        NextnError: whatever makes the run senseless, before any step is taken.
    """

    def __init__(
        self,
        config: TrainConfig,
        processes: Processes,
        make_reader: MakeReader,
        *,
        quiet: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.config, self.processes, self.quiet = config, processes, quiet
        self.output = Path(config.output)
        self.packs = config.accumulation or processes.world
        self.merges = self.output / "logs" / MERGES
        self.checkpoints = Checkpoints(self.output / "checkpoints", processes)
        self._refuse_early()
        target = open_target(config)
        self._require_room(target)
        reader = make_reader(config, target) if config.data or config.eval else None
        layers = config.cache is None or config.eval is not None
        self.begun: Start = start(config, processes, layers=layers, progress=progress)
        model = self.begun.model
        dtype = target_dtype(config, self.begun.checkpoint, processes.device)
        self.identity = target_identity(self.begun.checkpoint, dtype)
        self.source = self._source(reader)
        self.held_out: list[PackedBatch] = []
        if config.eval is not None:
            assert reader is not None
            require_layers(model, config.eval_draft_tokens)
            self.held_out = share(held_out(config, reader), processes)
        self.vocab = self._draft_vocab(model.config.vocab)
        spec = LossSpec(config.loss, config.step_weights, config.lk_eta, self.vocab)
        shard(model, self.begun.unroll, processes)
        self.step = HeadStep(self.begun, config, processes, spec)
        self.tally = Tally()
        self._resume()

    def run(self) -> dict[str, Any]:
        """Train to the last step and write the head; returns the facts that the command prints.

        Where no step is accepted more than a head that was there before, nothing is written (`keep_best`):
        ``exported_step`` is then None, and ``after`` tells of the best step.

        Raises:
            NextnError: another process writes into the output, it cannot be written, or the head did not change.
        """
        with held(self.output / "logs") if self.processes.first else nullcontext():
            # Several processes would see a signal at different steps, and a checkpoint is written by all together.
            with asked_to_stop() if self.processes.world == 1 else nullcontext(Asked()) as asked:
                self._train(asked)
            return self._finish()

    def _train(self, asked: Asked) -> None:
        config, step = self.config, self.step
        log = self._log() if self.processes.first else None
        try:
            if self.held_out and step.done == 0:
                self._evaluate(log)
            taught = 0
            while step.done < config.steps:
                taught += self._one_step(log)
                if asked.signal is not None:
                    self._stop(log, asked)
                at_end = step.done == config.steps
                if self.held_out and (step.done % config.eval_every == 0 or at_end):
                    self._evaluate(log)
                if step.done % config.save == 0 or at_end:
                    self._save()
                if at_end and not taught:
                    raise NextnError("No step had a token to predict.", "Check the data, and draft_vocab with ce.")
            self._open(log)
        finally:
            if isinstance(self.source, Ahead):
                self.source.close()
            if log is not None:
                log.close()

    def _stop(self, log: RunLog | None, asked: Asked) -> None:
        """Keep what is done and end as the signal asks."""
        self._save()
        if log is not None:
            log.say(f"stopped after step {self.step.done}; the same command goes on from there")
        asked.obey()

    def _refuse_early(self) -> None:
        config, world = self.config, self.processes.world
        if self.packs % world:
            raise NextnError(
                f"accumulation is {self.packs} for {world} processes.", "Give a multiple of the number of processes."
            )
        if config.merge is not None:
            self._refuse_merged(Path(config.merge))
        if self.output.exists() and not self.output.is_dir():
            raise NextnError(f"{self.output} is a file.", "Name a folder for the head.")
        if any(self.output.glob("*.safetensors")) and not (self.output / "logs" / FILE).is_file():
            raise NextnError(f"{self.output} holds a checkpoint that is not of a training run.", "Give another output.")
        inside = {path.name for path in self.output.iterdir()} if self.output.is_dir() else set()
        if inside and not inside & {"logs", "checkpoints", DRAFT_IDS}:
            raise NextnError(f"{self.output} holds other files.", "Give an output that is new or empty.")

    def _refuse_merged(self, out: Path) -> None:
        """Raises NextnError where `out` is there, unless this run is at its end and made it."""
        newest = self.checkpoints.newest()
        ours = merged_head(self.merges, out) is not None
        done = newest is not None and newest >= self.config.steps
        if ours and done:
            return
        if ours and newest is not None:
            raise NextnError(
                f"{out} holds this run's head of {newest} steps already, and {self.config.steps} are asked for.",
                f"Remove {out}, or give another merge, and run the same command again: it goes on.",
            )
        if done and os.path.lexists(out) and any(self.output.glob("*.safetensors")):
            raise NextnError(
                f"{out} exists already and is not what this run merged; the head is done: {self.output}.",
                f"Remove {out}, or give another merge, and run the same command again.",
            )
        refuse_existing(out)

    def _require_room(self, target: Checkpoint) -> None:
        config, device = self.config, self.processes.device
        sizes = [target_dtype(config, target, device).itemsize, 2 if head_is_cast(config, device) else 4]
        rows = self.packs // self.processes.world
        require_room(config, decoder_config(target.config), min(sizes), self.processes, steps=config.unroll, rows=rows)

    def _source(self, reader: LineReader | None) -> Source:
        if self.config.cache is not None:
            cached = CachedSource(Path(self.config.cache), self.identity, self.processes)
            require_settings(cached.facts, self.config)
            return cached
        assert reader is not None
        return Ahead(DataSource(self.config, reader, self.processes))

    def _draft_vocab(self, vocab: int) -> Tensor | None:
        """[ids] ascending."""
        wanted, device = self.config.draft_vocab, self.processes.device
        if isinstance(wanted, int):
            return frequent_ids(self.source, wanted, vocab).to(device)
        if wanted == "full":
            return None
        listed = self.begun.draft_ids if wanted is None else _listed(wanted)
        if listed is None:
            return None
        if listed[-1] >= vocab:
            name = wanted or "The draft vocabulary of init"
            raise NextnError(
                f"{name} names id {listed[-1]}, and the vocabulary has {vocab}.", "Name ids of this model."
            )
        if len(listed) == 1:
            raise NextnError(*ONE_ID)
        return torch.tensor(listed, device=device)

    def _identity(self) -> dict[str, Any]:
        """What must not change between parts of one run."""
        given = self.config.model_dump(exclude=set(RUN_ONLY))
        return {**given, "accumulation": self.packs}

    def _resume(self) -> None:
        newest = self.checkpoints.newest()
        if newest is None:
            return
        if not self.config.resume:
            raise NextnError(
                f"{self.output} holds a run of {newest} steps, and resume is false.", "Give another output."
            )
        if newest > self.config.steps:
            raise NextnError(
                f"{self.output} holds a run of {newest} steps, more than steps = {self.config.steps}.",
                f"Give another output, or steps={newest} or more.",
            )
        facts = self.checkpoints.facts(newest)
        mine = self._identity()
        # A cache is told by its contents, in `load_state_dict`.
        mine["cache"] = facts["config"].get("cache") if mine.get("cache") else None
        changed = [key for key, value in facts["config"].items() if mine.get(key) != value]
        if changed:
            raise NextnError(
                f"{self.output} holds a run of {newest} steps with another {changed[0]}"
                f" ({facts['config'][changed[0]]!r}, now {mine.get(changed[0])!r}).",
                "Give another output, or the settings of that run.",
            )
        if facts.get("target") != self.identity:
            raise NextnError(
                f"{self.output} holds a run of {newest} steps on another target, or in another dtype.",
                "Give another output, or the target of that run.",
            )
        listed = self.output / DRAFT_IDS
        if listed.is_file() and _listed(str(listed)) != (self.vocab.tolist() if self.vocab is not None else None):
            raise NextnError(
                f"{self.output} holds a run of {newest} steps that drafts from other ids.",
                "Give another output, or the ids and the cache of that run.",
            )
        self.checkpoints.load(newest, self.begun.unroll, self.step.optimisers)
        self.source.load_state_dict(facts["data"])
        self.tally = Tally(**facts["tally"])
        self.step.done = newest

    def _log(self) -> RunLog:
        log = RunLog(self.output / "logs", self.config, self.step.done, quiet=self.quiet)
        if self.step.done:
            log.say(f"resumed after step {self.step.done}")
        elif any(self.output.glob("*.safetensors")):
            log.say("begins anew: of the run before no checkpoint is left; its head is replaced at the end")
        return log

    def _open(self, log: RunLog | None) -> None:
        """Let the run be on disk: not before a step is taken, so that a refused one leaves the output as it was."""
        if log is not None and not log.opened:
            place_draft_ids(self.output, self.vocab)
            log.open()

    def _one_step(self, log: RunLog | None) -> int:
        """Take a step; returns the rows it taught."""
        began = time.monotonic()
        rate = self.step.rate()
        items = [self.source.take() for _ in range(self.packs // self.processes.world)]
        if log is not None and self.step.done == 0:
            self._tell_coverage(log, items)
        result = self.step(items)
        self._open(log)
        seconds = time.monotonic() - began
        tally = self.tally
        tally.tokens, tally.seconds, tally.loss = tally.tokens + result.tokens, tally.seconds + seconds, result.loss
        done = self.step.done
        if log is not None and (done % self.config.log_every == 0 or done in (1, self.config.steps)):
            log.step(
                {
                    "step": done,
                    "loss": result.loss,
                    "loss_by_step": result.by_step,
                    "lr": rate,
                    "gradient": result.gradient,
                    "tokens": tally.tokens,
                    "tokens_per_second": result.tokens / seconds,
                    "time": tally.seconds,
                }
            )
        return result.rows

    def _tell_coverage(self, log: RunLog, items: Sequence[Item]) -> None:
        """How much of the data a draft vocabulary holds: losses count little else, so that a useless one looks good."""
        if self.vocab is None:
            return
        predicted = torch.cat([batch.ids[batch.loss_mask] for batch, _ in items])
        share = torch.isin(predicted, self.vocab.to(predicted.device)).double().mean().item()
        warning = "" if share >= LEAST_COVERAGE else ", too little to draft from"
        log.say(f"draft vocabulary: {len(self.vocab)} ids, {share:.1%} of the first step's tokens{warning}")

    def _evaluate(self, log: RunLog | None) -> None:
        """Judge the head, and keep it where it is accepted best."""
        began = time.monotonic()
        model, done = self.begun.model, self.step.done
        assert isinstance(model, Decoder)
        earlier = self._earlier_ids() if done == 0 else self.vocab
        with gathered(model):
            figures, limited = (
                evaluate(
                    model,
                    self.held_out,
                    draft_tokens=self.config.eval_draft_tokens,
                    draft_ids=ids,
                    unroll=self.step.judged,
                    together=self.processes,
                ).as_json()
                if wanted
                else None
                for ids, wanted in ((earlier, True), (self.vocab, earlier is not self.vocab))
            )
        assert figures is not None
        tally = self.tally
        tally.last = figures
        if done == 0:
            tally.before, tally.limited = figures, limited
        elif tally.best is None or figures["accept_length"] > tally.best["accept_length"]:
            tally.best, tally.best_step = figures, done
            self.checkpoints.save_best(done, self.begun.unroll)
        tally.seconds += time.monotonic() - began
        if log is not None:
            log.evaluation(done, figures, limited)

    def _earlier_ids(self) -> Tensor | None:
        """What a head that was there drafted: this run's ids, the very tensor, where that is the same."""
        listed = self.begun.draft_ids
        same = listed is None if self.vocab is None else listed == self.vocab.tolist()
        if same or self.config.init == "scratch":
            return self.vocab
        return None if listed is None else torch.tensor(listed, device=self.processes.device)

    def _save(self) -> None:
        facts = {
            "config": self._identity(),
            "target": self.identity,
            "data": self.source.state_dict(),
            "tally": vars(self.tally),
            "best_step": self.tally.best_step,
        }
        self.checkpoints.save(self.step.done, self.begun.unroll, self.step.optimisers, facts, self.config.keep)

    def _unbeaten(self) -> bool:
        """Whether a head was there before that no step, drafting from the same ids, is accepted more than."""
        before, best = self.tally.limited or self.tally.before, self.tally.best
        there = self.config.init != "scratch"
        return there and before is not None and best is not None and best["accept_length"] <= before["accept_length"]

    def _finish(self) -> dict[str, Any]:
        tally, first, keep_best = self.tally, self.processes.first, self.config.keep_best
        unbeaten = self._unbeaten()
        exported = tally.best_step if keep_best and tally.best_step is not None else self.step.done
        nothing = unbeaten and keep_best
        if not nothing:
            if exported != self.step.done:
                self.checkpoints.load_best(exported, self.begun.unroll)
            write_head(self.begun, self.output, first=first)
        if first:
            write_report(self.output)
        merge = None if nothing else self.config.merge
        if merge is not None and first:
            merge_head(self.begun, self.output, Path(merge), self.merges)
        self.processes.wait()
        return {
            "output": str(self.output),
            "merged": merge,
            "steps": self.step.done,
            "tokens": tally.tokens,
            "seconds": tally.seconds,
            "loss": tally.loss,
            "before": tally.before,
            "before_limited": tally.limited,
            "after": tally.best if keep_best else tally.last,
            "best_step": 0 if unbeaten else tally.best_step,
            "exported_step": None if nothing else exported,
            "data": self.source.report(),
        }


def _listed(wanted: str) -> list[int]:
    """Ids of a draft vocabulary's file, or of the one in a head's folder."""
    path = Path(wanted) / DRAFT_IDS if Path(wanted).is_dir() else Path(wanted)
    if not path.is_file():
        raise NextnError(
            f"draft_vocab is {wanted!r}, and there is no file {path}.",
            f"Give a number of ids, `full`, or a {DRAFT_IDS} or the folder of a head that has one.",
        )
    return listed_ids(read_json(path), str(path))
