"""The commands `nextn train` and `nextn cache`: read the configuration, run, say what came of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nextn.checkpoint.jsonfile import read_json
from nextn.checkpoint.source import Checkpoint
from nextn.errors import NextnError
from nextn.train.config import TrainConfig, describe, load_config
from nextn.train.documents import LineReader
from nextn.train.formats import DataReport

Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", help="A YAML file, and keys over it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")]
HelpConfig = Annotated[bool, typer.Option("--help-config", help="List every key with its default, and stop.")]
CACHE_EPILOG = """
Examples:\n
\b
  nextn cache data=text.jsonl steps=60 --out states
  nextn cache recipes/qwen3_5.yaml data=own-answers.jsonl --out states --batches 2000
"""
TRAIN_EPILOG = """
Examples:\n
\b
  nextn train data=text.jsonl output=head steps=60 unroll=2
  nextn train recipes/qwen3_5.yaml data=own-answers.jsonl eval=held-out.jsonl loss=lk
  torchrun --nproc-per-node 8 -m nextn.cli train recipes/qwen3_5.yaml accumulation=16
"""


def train(settings: Settings = None, help_config: HelpConfig = False, as_json: Json = False) -> None:
    """Train an MTP head the way an engine runs it; the target stays as it is."""
    if help_config:
        print(describe())
        return
    config = read_settings(settings or [])

    from nextn.engine.progress import loading
    from nextn.engine.threads import fit_threads
    from nextn.models.load import parameter_bytes
    from nextn.train.processes import processes
    from nextn.train.trainer import Trainer

    with processes(config.device) as group:
        quiet = not group.first
        with loading(sys.stderr) as progress:
            trainer = Trainer(config, group, make_reader, quiet=quiet, progress=None if quiet else progress)
        if group.device.type == "cpu":
            fit_threads(parameter_bytes(trainer.begun.model.parameters()))
        facts = trainer.run()
    if quiet:
        return
    _print(facts, as_json, from_scratch=config.init == "scratch")
    if facts["exported_step"] is None:
        before, after = (
            found["accept_length"] for found in (facts["before_limited"] or facts["before"], facts["after"])
        )
        kept = config.output + "/checkpoints"
        raise NextnError(
            f"No step beat the head that it started from (accept length {before:.3f}, {after:.3f} at best), so nothing "
            f"is exported; the last checkpoint is {kept}/step-{facts['steps']}.",
            "Lower lr, or give more and closer data; the same command with keep_best=false exports the last step.",
            exit_code=1,
        )


def cache(
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the cache; one that a killed run left is completed.")
    ] = None,
    batches: Annotated[
        int | None, typer.Option(help="Packed batches to cache [steps x accumulation].", min=1, max=10**9)
    ] = None,
    as_json: Json = False,
) -> None:
    """Keep the target's hidden states on disk, to train a head from them without the target (`cache=FOLDER`)."""
    if out is None:
        raise NextnError("No folder is named for the cache.", "Give --out FOLDER.")
    config = read_settings(settings or [])
    if not config.data:
        raise NextnError("No training data is named.", "Give data=FILE.jsonl.")
    if config.cache is not None:
        raise NextnError(f"cache={config.cache} names hidden states to train from.", "Leave it out, or null it.")

    from nextn.engine.progress import loading
    from nextn.models.config import decoder_config
    from nextn.models.decoder import Decoder
    from nextn.train.hidden_cache import FACTS, refuse_other, write_cache
    from nextn.train.identity import target_identity
    from nextn.train.load_target import load_target
    from nextn.train.processes import Processes, processes
    from nextn.train.progress import Progress
    from nextn.train.room import require_room
    from nextn.train.shard import shard
    from nextn.train.source import DataSource
    from nextn.train.start import open_target, target_dtype

    with processes(config.device) as group:
        refuse_other(out)
        checkpoint = open_target(config)
        dtype = target_dtype(config, checkpoint, group.device)
        require_room(config, decoder_config(checkpoint.config), dtype.itemsize, group, steps=0, rows=1)
        identity = target_identity(checkpoint, dtype)
        with loading(sys.stderr) as progress:
            model = load_target(checkpoint, dtype, group, progress=progress if group.first else None)
        assert isinstance(model, Decoder)
        shard(model, None, group)
        source = DataSource(config, make_reader(config, checkpoint), Processes(0, 1, group.device))
        count = batches if batches is not None else config.steps * (config.accumulation or group.world)
        try:
            with Progress("caching", "batches", count, sys.stderr) as bar:
                told = bar.at if group.first else None
                facts = write_cache(model, identity, source, config, out, count, group, progress=told)
        except KeyboardInterrupt:
            if group.first:
                kept = read_json(out / FACTS)["batches"] if (out / FACTS).is_file() else 0
                print(f"stopped after batch {kept}; the same command goes on from there", file=sys.stderr)
            raise
    if not group.first:
        return
    stored = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    if as_json:
        print(json.dumps({"out": str(out), "batches": facts["batches"], "bytes": stored, "data": facts.get("report")}))
    else:
        print(f"{out}: {facts['batches']} batches, {stored / 1e6:,.1f} MB")


def read_settings(words: list[str]) -> TrainConfig:
    """A YAML file, if the first word is one, and ``key=value`` words."""
    if words and "=" not in words[0]:
        if words[0] in TrainConfig.model_fields:
            raise NextnError(f"{words[0]} is a key without a value.", f"Write {words[0]}=VALUE.")
        return load_config(Path(words[0]), words[1:])
    return load_config(None, words)


def make_reader(config: TrainConfig, checkpoint: Checkpoint) -> LineReader:
    """Reads data lines for a target, with its tokenizer and end ids."""
    from nextn.engine.defaults import read_defaults
    from nextn.engine.text import load_tokenizer
    from nextn.models.config import decoder_config

    assert checkpoint.root is not None
    tokenizer = load_tokenizer(checkpoint.root)
    defaults = read_defaults(
        checkpoint.config, checkpoint.json("generation_config.json"), tokenizer.eos_ids if tokenizer else ()
    )
    target = decoder_config(checkpoint.config)
    return LineReader(
        tokenizer,
        vocab=target.vocab,
        eos_ids=defaults.eos_ids,
        max_length=min(config.max_length, target.max_positions),
    )


def _print(facts: dict[str, Any], as_json: bool, *, from_scratch: bool) -> None:
    if as_json:
        print(json.dumps(facts))
        return
    rate = facts["tokens"] / facts["seconds"] if facts["seconds"] else 0.0
    print(f"{facts['steps']} steps, {facts['tokens']:,} tokens, {facts['seconds']:.1f} s ({rate:,.0f} tokens/s)")
    report = DataReport(**facts["data"])
    if report.malformed:
        print("\n".join(report.summary()))
    for name, told in (("before", "before"), ("before_limited", "before, from this run's ids"), ("after", "after")):
        if facts[name] is not None:
            figures = facts[name]
            shown = " ".join(f"{a:.3f}" for a in figures["acceptance"])
            print(f"accept length {told}: {figures['accept_length']:.3f} ({shown})")
    exported = facts["exported_step"] is not None
    if exported and facts["before"] and facts["after"] and (found := _verdict(facts, from_scratch)):
        print(found)
    if exported:
        print(f"head: {facts['output']}" + (f", merged: {facts['merged']}" if facts["merged"] else ""))


def _verdict(facts: dict[str, Any], from_scratch: bool) -> str | None:
    """What to say of an exported head that is accepted no better than before its first step."""
    before, limited, after = (
        found and found["accept_length"] for found in (facts["before"], facts["before_limited"], facts["after"])
    )
    if from_scratch and after <= before:
        return "The trained head is accepted no more than the untrained one that it began as: train longer or lower lr."
    if limited and limited <= after < before:
        return "The head is accepted less than before, since it drafts from fewer ids: a larger draft_vocab costs less."
    if after < (limited or before):
        return "The trained head is accepted less than the one it started from: lower lr, or give more and closer data."
    return None


cache.__doc__ = (cache.__doc__ or "") + "\n" + CACHE_EPILOG
train.__doc__ = (train.__doc__ or "") + "\n" + TRAIN_EPILOG
