"""`nextn eval`: load, judge the head on text, optionally decode beside it, print a table or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from nextn.engine.command import asked_vocab, check_vocab_text
from nextn.errors import NextnError

LOADING = "Loading"
MOST_HELD_TOKENS = 4_000_000
"""Of texts that are read before they are judged, so that progress has an end: about 100 MB."""
EPILOG = """
Examples:\n
\b
  nextn eval --data held-out.jsonl
  nextn eval ./Qwen3.5-4B --head ./new-head --data held-out.jsonl --temperature 0.7 --decode --plot acceptance.png
  nextn eval ./Qwen3.5-4B --data held-out.jsonl --json
"""


def eval_(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub repository; default: the embedded model.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="JSONL file (or .jsonl.gz, or a folder of them), repeatable.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Judge the head in this folder instead.")] = None,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", "-k", help="Draft length K, 1 to 8.")] = 3,
    draft_vocab: Annotated[
        str | None,
        typer.Option(
            help="Draft only the N most frequent tokens (N needs a token_order.json in the checkpoint, or "
            "--draft-vocab-text), or a file of ids. [what the head was trained to draft; full drafts from all]"
        ),
    ] = None,
    draft_vocab_text: Annotated[
        Path | None, typer.Option(help="Text like the target's, to count frequent tokens for --draft-vocab N in.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Also measure at this temperature, beside greedy.")] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens of text to judge, rounded up to whole forwards; 0 is all.")
    ] = 65536,
    max_length: Annotated[int, typer.Option(help="Longest text; longer ones are cut.")] = 2048,
    batch_tokens: Annotated[int, typer.Option(help="Tokens a forward.")] = 4096,
    seed: Annotated[int, typer.Option(help="Which texts, when not all, and the engine's sampling.")] = 0,
    decode: Annotated[
        bool, typer.Option("--decode", help="Also decode from the texts' prompts in the engine, and count its rounds.")
    ] = False,
    decode_prompts: Annotated[int, typer.Option(help="Prompts to decode from.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens to decode a prompt.")] = 128,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or float64.", rich_help_panel=LOADING)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel=LOADING)] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub repository.", rich_help_panel=LOADING)
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="Access token for the hub.", envvar="HF_TOKEN", rich_help_panel=LOADING)
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Another cache than the hub's own.", rich_help_panel=LOADING)
    ] = None,
) -> None:
    """Say how many draft tokens of a head its target accepts, by position, context length and domain."""
    if not data:
        raise NextnError("No text is named.", "Give --data FILE.jsonl.")
    for name, value, least in (
        ("--tokens", tokens, 0),
        ("--max-length", max_length, 4),
        ("--batch-tokens", batch_tokens, max_length),
        ("--decode-prompts", decode_prompts, 1),
        ("--max-tokens", max_tokens, 1),
    ):
        if value < least:
            raise NextnError(f"{name} is {value}.", f"Give a whole number of {least} or more.")
    if not 1 <= draft_tokens <= 8:
        raise NextnError(f"--draft-tokens is {draft_tokens}.", "Give a whole number from 1 to 8.")
    if temperature is not None and not 0 < temperature < float("inf"):
        raise NextnError(f"--temperature is {temperature}.", "Give a number over 0; greedy is always measured.")
    if not 0 <= seed < 2**63:
        raise NextnError(f"--seed is {seed}.", f"Give a whole number from 0 to {2**63 - 1}.")
    if plot is not None and (plot.is_dir() or not plot.parent.is_dir()):
        raise NextnError(f"--plot {plot} names no file in a folder that exists.", "Name another file.")
    if plot is not None and plot.suffix.lower() != ".png":
        raise NextnError(f"--plot {plot} does not end in .png, and PNG is what is written.", "Name a file.png.")
    check_vocab_text(draft_vocab, draft_vocab_text)

    import torch

    from nextn import api
    from nextn.engine.progress import loading
    from nextn.train.data import Batches, batches
    from nextn.train.decode_eval import decode_acceptance, prompts
    from nextn.train.documents import LineReader
    from nextn.train.evaluate import evaluate
    from nextn.train.packing import PackedBatch
    from nextn.train.progress import Progress

    with loading(sys.stderr) as progress:
        loaded = api.load(
            model,
            head=head,
            dtype=dtype,
            device=device,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            progress=progress,
        )
    vocab = api.draft_vocabulary(loaded, asked_vocab(loaded, draft_vocab, draft_vocab_text))
    ids = torch.tensor(vocab, device=loaded.target.embed.weight.device) if vocab is not None else None

    def texts() -> Batches:
        reader = LineReader(
            loaded.tokenizer,
            vocab=loaded.target.config.vocab,
            eos_ids=loaded.defaults.eos_ids,
            max_length=min(max_length, loaded.target.config.max_positions),
        )
        return batches(data, reader, batch_tokens=batch_tokens, seed=seed, epochs=1, pad=False)

    given = texts()

    def limited() -> Iterator[PackedBatch]:
        seen = 0
        for batch in given:
            yield batch
            seen += batch.ids.shape[1]
            if 0 < tokens <= seen:
                return

    chosen: Iterable[PackedBatch] = limited()
    total = None
    if 0 < tokens <= MOST_HELD_TOKENS:
        chosen = list(chosen)
        total = sum(batch.ids.shape[1] for batch in chosen)
    with Progress("judging", "tokens", total, sys.stderr) as bar:
        judged = evaluate(
            loaded.target,
            chosen,
            draft_tokens=draft_tokens,
            temperature=temperature,
            draft_ids=ids,
            progress=bar.at,
        )
    found: dict[str, Any] = {
        "model": str(model or "nextn-tiny"),
        "head": head,
        "data": data,
        "draft_vocab": len(vocab) if vocab is not None else None,
        **judged.as_json(),
        "decode": None,
        "decode_sampled": None,
        "lines": given.report.as_json(),
    }
    if decode:
        starts = prompts(texts(), decode_prompts)
        for name, heat in (("decode", 0.0), ("decode_sampled", temperature)):
            if heat is None:
                continue
            with Progress("decoding", "prompts", len(starts), sys.stderr) as bar:
                found[name] = decode_acceptance(
                    loaded,
                    starts,
                    draft_tokens=draft_tokens,
                    draft_vocab=vocab if vocab is not None else "full",
                    max_tokens=max_tokens,
                    temperature=heat,
                    seed=seed,
                    progress=bar.of,
                )
    if as_json:
        print(json.dumps(found))
    else:
        print("\n".join(screen(found)))
        problems = given.report.summary()[1:]
        if problems:
            print("\n".join(problems), file=sys.stderr)
    if plot is not None:
        from nextn.train.plot import draw

        draw(found, plot)


def screen(found: dict[str, Any]) -> list[str]:
    """The table of an evaluation's JSON object."""
    from nextn.train.plot import measures, span

    k = found["draft_tokens"]
    width = 43
    lines = ["".ljust(width) + "accept length   " + "  ".join(f"d{i + 1}".rjust(6) for i in range(k)) + "    rounds"]

    def row(title: str, counts: dict[str, Any]) -> str:
        if counts["accept_length"] is None:
            return f"{title:<{width}}no rounds"
        shares = "  ".join(f"{100 * a:5.1f}%" for a in counts["acceptance"])
        return f"{title:<{width}}{counts['accept_length']:13.3f}   {shares}  {counts['rounds']:8.0f}"

    for title, counts in measures(found).items():
        lines.append(row(title, dict(counts)))
    for bucket in found["buckets"]:
        lines.append(row(f"  greedy, context {span(bucket)}", bucket))
    for name, counts in found["domains"].items():
        lines.append(row(f"  greedy, domain {name}"[: width - 1], counts))
    own = found["own_text"]
    lines.append(f"{found['tokens']} tokens judged, {100 * own:.1f}% of them the target's own choice.")
    if found["draft_vocab"] is not None:
        lines.append(f"The head drafts {found['draft_vocab']:,} ids only.")
    return lines


eval_.__doc__ = (eval_.__doc__ or "") + "\n" + EPILOG
