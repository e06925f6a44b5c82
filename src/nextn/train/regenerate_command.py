"""`nextn regenerate`: read prompts, have them answered, append each answer to the file as it comes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nextn.engine.params import SamplingParams
from nextn.errors import NextnError

if TYPE_CHECKING:
    from nextn.train.dialogue import Answered

SAMPLING = "Sampling (defaults: the model's own)"
LOCAL = "Local engine"
SERVER = "Server"
MOST_REQUESTS = 4096
"""At a time: each has a thread."""
LONGEST_TIMEOUT_SECONDS = 86400.0
EPILOG = """
Examples:\n
\b
  nextn regenerate ./Qwen3.5-4B --prompts prompts.jsonl --out own.jsonl
  nextn regenerate --endpoint http://localhost:8000 --prompts sharegpt.jsonl --out own.jsonl --concurrency 64
"""


def regenerate(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub repository; default: the embedded model.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="JSONL of messages, conversations, prompt, text or input_ids; a file or folder, repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to append answers to; what it answers is skipped.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-compatible server, instead of a model here.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Give plain text to the model as a user's message.")] = False,
    limit: Annotated[int | None, typer.Option(help="Answer the first so many lines.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", rich_help_panel=SAMPLING)] = 1024,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = None,
    top_p: Annotated[float | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    min_p: Annotated[float | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=SAMPLING)] = None,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.", rich_help_panel=LOCAL)] = 16,
    head: Annotated[str | None, typer.Option(help="Draft with the head in this folder.", rich_help_panel=LOCAL)] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option("--draft-tokens", "-k", help="Draft length K, 1 to 8; 0 for none.", rich_help_panel=LOCAL),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or float64.", rich_help_panel=LOCAL)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel=LOCAL)] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub repository.", rich_help_panel=LOCAL)
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="Access token for the hub.", envvar="HF_TOKEN", rich_help_panel=LOCAL)
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Another cache than the hub's own.", rich_help_panel=LOCAL)
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="Model's name at the server; default: its only one.", rich_help_panel=SERVER)
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.", rich_help_panel=SERVER)] = 32,
    retries: Annotated[int, typer.Option(help="Further attempts of a request.", rich_help_panel=SERVER)] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds of an attempt.", rich_help_panel=SERVER)] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Write training data that the target answered itself, from prompts. Run it again to go on after an interruption.

    The key for a server is read from OPENAI_API_KEY.
    """
    if not prompts or out is None:
        raise NextnError("No prompts or no file for the answers is named.", "Give --prompts FILE and --out FILE.")
    if endpoint is not None and model is not None:
        raise NextnError("Both a model and --endpoint are given.", "Give one; --served-model names a server's model.")
    for name, value, least in (("--batch", batch, 1), ("--limit", limit, 1), ("--retries", retries, 0)):
        if value is not None and value < least:
            raise NextnError(f"{name} is {value}.", f"Give a whole number of {least} or more.")
    for name, value, least, most in (
        ("--draft-tokens", draft_tokens, 0, 8),
        ("--concurrency", concurrency, 1, MOST_REQUESTS),
    ):
        if value is not None and not least <= value <= most:
            raise NextnError(f"{name} is {value}.", f"Give a whole number from {least} to {most}.")
    if not 0 < timeout <= LONGEST_TIMEOUT_SECONDS:
        raise NextnError(
            f"--timeout is {timeout:g}.", f"Give a number of seconds over 0, up to {LONGEST_TIMEOUT_SECONDS:.0f}."
        )
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
    }
    SamplingParams(**{name: value for name, value in {**options, "seed": seed}.items() if value is not None})

    from nextn.train.answers_file import AnswersFile, digest
    from nextn.train.dialogue import Dialogue
    from nextn.train.formats import DataReport, MalformedError, parse_line
    from nextn.train.lines import Lines
    from nextn.train.progress import Progress

    lines = Lines(prompts)
    if not len(lines):
        raise NextnError(f"{', '.join(map(str, lines.paths))} holds no prompt.", "Give one JSON object a line.")
    server = None
    if endpoint is not None:
        from nextn.train.endpoint import Endpoint

        server = Endpoint(
            endpoint,
            model=served_model,
            api_key=os.environ.get("OPENAI_API_KEY"),
            options={name: value for name, value in options.items() if value is not None},
            retries=retries,
            timeout_seconds=timeout,
        )
    # A server may move to another address between two parts of a run; the model that it serves may not change.
    settings = {**options, "seed": seed, "chat": chat, "model": model, "served": server and server.model}
    count = len(lines) if limit is None else min(limit, len(lines))
    malformed = DataReport()

    def expected(number: int) -> str | None:
        return digest(lines[number], settings) if number < len(lines) else None

    with AnswersFile(out, expected) as answers:
        before = len(answers.done)

        def dialogues() -> Iterator[Dialogue]:
            for number in range(count):
                if number in answers.done:
                    continue
                try:
                    yield Dialogue.begin(number, parse_line(lines[number]), chat=chat)
                except MalformedError as error:
                    malformed.reject(str(error), lines.where(number))

        def answered() -> Iterator[Answered]:
            if server is None:
                from nextn.train.local_answers import answer_locally

                loaded = _load(model, head, dtype, device, revision, token, cache_dir)
                k = draft_tokens if loaded.has_head else 0
                yield from answer_locally(
                    loaded, dialogues(), at_once=min(batch, count), options=options, draft_tokens=k, seed=seed
                )
                return
            from nextn.train.endpoint_answers import answer_remotely

            yield from answer_remotely(server, dialogues(), at_once=min(concurrency, count), seed=seed)

        refused: list[str] = []
        tokens, turns = 0, 0
        started = time.monotonic()
        try:
            with Progress("regenerating", "prompts", count, sys.stderr) as bar:
                for dialogue, problem in answered() if before < count else ():
                    if problem is not None:
                        refused.append(f"{lines.where(dialogue.number)}: {problem}")
                    else:
                        answers.append(dialogue.number, digest(lines[dialogue.number], settings), dialogue.result())
                        tokens, turns = tokens + dialogue.tokens, turns + dialogue.turn
                    rate = tokens / (time.monotonic() - started)
                    bar.at(len(answers.done) + len(refused), f"{rate:.0f} tokens/s")
        except KeyboardInterrupt:
            told = f"stopped with {answers.count()} of {count} prompts answered"
            print(f"{told}; the same command goes on from there", file=sys.stderr)
            raise
        new = len(answers.done) - before
    rejected = sum(malformed.malformed.values())
    report: dict[str, Any] = {
        "out": str(out),
        "prompts": count,
        "answered": new,
        "before": before,
        "turns": turns,
        "tokens": tokens,
        "seconds": time.monotonic() - started,
        "refused": len(refused),
        "malformed": malformed.malformed,
        "examples": (malformed.examples + refused)[:10],
    }
    if as_json:
        print(json.dumps(report))
    else:
        counts = (
            (new, "prompts answered"),
            (before, "answered before"),
            (len(refused), "refused"),
            (rejected, "malformed"),
        )
        said = ", ".join(f"{n} {what}" for n, what in counts if n) or "nothing to do"
        where = f" -> {out}" if new + before else ""
        print(f"{said}; {tokens} tokens in {report['seconds']:.1f} s{where}")
        for example in report["examples"]:
            print(f"  {example}", file=sys.stderr)
    if refused or (rejected and not new + before):
        raise typer.Exit(1)


def _load(
    model: str | None,
    head: str | None,
    dtype: str | None,
    device: str | None,
    revision: str | None,
    token: str | None,
    cache_dir: Path | None,
) -> Any:
    """The model, with its head where it has one."""
    from nextn import api
    from nextn.assets import embedded_model
    from nextn.checkpoint.download import local_folder
    from nextn.checkpoint.source import open_checkpoint
    from nextn.engine.progress import loading
    from nextn.models.config import decoder_config
    from nextn.models.load import count_head_layers

    folder = local_folder(
        model if model is not None else embedded_model(), revision=revision, token=token, cache_dir=cache_dir
    )
    checkpoint = open_checkpoint(folder)
    drafts = head is not None or count_head_layers(checkpoint, decoder_config(checkpoint.config)) > 0
    with loading(sys.stderr) as progress:
        return api.load(folder, mtp=drafts, head=head, dtype=dtype, device=device, progress=progress)


regenerate.__doc__ = cleandoc(regenerate.__doc__ or "") + "\n" + EPILOG
