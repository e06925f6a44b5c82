"""`nextn demo`: the whole story on the embedded model: what is in it, and decoding with and without its head."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from nextn.errors import NextnError

PROMPTS = ("class Counter(dict):", "def _parse_args(argv=None):", "def test_copy(self):")
REPETITION_PENALTY = 1.2
"""A model as small as the embedded one repeats itself without."""


def demo(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub repository; default: the embedded model.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompt text, repeatable; default: three of its own.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", "-k", help="Draft length K, 1 to 8.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate a prompt.")] = 96,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what is in a checkpoint, decode with and without its head, and compare: tokens, accept length, speed.

    Examples:

    \b
      nextn demo
      nextn demo ./Qwen3.5-0.8B --prompt "Once upon a time" --max-tokens 200
    """
    if not 1 <= draft_tokens <= 8:
        raise NextnError(f"--draft-tokens is {draft_tokens}.", "Give a whole number from 1 to 8.")
    if max_tokens < 1:
        raise NextnError(f"--max-tokens is {max_tokens}.", "Give a whole number of 1 or more.")
    if "" in (prompt or ()):
        raise NextnError("A prompt is empty.", "Give at least one character.")
    from rich.console import Console
    from rich.text import Text

    from nextn import api
    from nextn.checkpoint.source import open_checkpoint
    from nextn.engine.show import Printer, legend
    from nextn.engine.threads import fit_threads
    from nextn.inspect.examine import examine
    from nextn.inspect.report import headline

    try:
        loaded = api.load(model)
    except NextnError as error:
        if "--no-mtp" in error.fix:
            raise NextnError(error.what, "Name a checkpoint with a head; the demo compares with and without.") from None
        raise
    fit_threads(loaded.weight_bytes)
    if loaded.tokenizer is None:
        raise NextnError(
            f"{loaded.folder} ships no tokenizer.", "The demo needs text; see `nextn generate --prompt-ids`."
        )
    report = examine(open_checkpoint(loaded.folder))
    console = Console(highlight=False)
    if not as_json:
        config = loaded.target.config
        console.print(Text(headline(report)[0], style="bold"))
        console.print(
            f"{config.layers} layers ({config.linear_layers} gated delta net, {config.full_layers} full attention), "
            f"hidden {config.hidden}, vocabulary {config.vocab}; {loaded.weight_bytes / 1e6:.1f} MB of weights in "
            f"memory, of them the head {loaded.report.head_bytes / 1e6:.1f} MB"
        )
        console.print(
            f"\nDecoding greedily, repetition penalty {REPETITION_PENALTY}. {legend(sys.stdout)}\n", markup=False
        )
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "repetition_penalty": REPETITION_PENALTY,
    }
    for k in (0, draft_tokens):
        api.generate(loaded, PROMPTS[0], draft_tokens=k, max_tokens=8, temperature=0.0)
    rows = []
    for text in prompt or PROMPTS:
        off = api.generate(loaded, text, draft_tokens=0, **options)
        run = api.Run(loaded, [text], draft_tokens=draft_tokens, **options)
        if as_json:
            for _ in run:
                pass
        else:
            console.print(Text(text, style="bold"), end="")
            printer = Printer(sys.stdout, loaded.tokenizer, run.requests[0].prompt, mark_drafts=True)
            for step in run:
                printer.step(step)
            printer.end()
            console.print()
        rows.append((text, off, run.results[0]))
    out = summarise(rows)
    if as_json:
        print(json.dumps({"source": report.as_json()["source"], "draft_tokens": draft_tokens, **out}))
    else:
        console.print(table(out))
        console.print(
            "\nNext: `nextn generate --prompt TEXT --show-drafts`, `nextn inspect FOLDER`, `nextn --help`.", style="dim"
        )
    if not out["identical"]:
        raise typer.Exit(1)


def summarise(rows: list[tuple[str, Any, Any]]) -> dict[str, Any]:
    """Figures of each prompt and of all: rows are (prompt, `Generation` without the head, with it)."""

    def entry(prompt: str | None, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        rounds = sum(on.rounds for _, on in pairs)
        accepted = sum(on.accepted for _, on in pairs)
        width = max((len(on.acceptance) for _, on in pairs), default=0)
        kept = [sum(on.acceptance[i] * on.rounds for _, on in pairs if on.acceptance) for i in range(width)]
        speed_off = sum(len(off.tokens) for off, _ in pairs) / sum(off.seconds for off, _ in pairs)
        speed_on = sum(len(on.tokens) for _, on in pairs) / sum(on.seconds for _, on in pairs)
        return {
            "prompt": prompt,
            "identical": all(off.tokens == on.tokens for off, on in pairs),
            "tokens": sum(len(on.tokens) for _, on in pairs),
            "rounds": rounds,
            "accept_length": 1 + accepted / rounds if rounds else None,
            "acceptance": [value / rounds for value in kept] if rounds else [],
            "tokens_per_second": speed_on,
            "tokens_per_second_without": speed_off,
            "speedup": speed_on / speed_off,
        }

    total = entry(None, [(off, on) for _, off, on in rows])
    return {**total, "prompts": [entry(prompt, [(off, on)]) for prompt, off, on in rows]}


def table(out: dict[str, Any]) -> Any:
    """The closing table."""
    from rich import box
    from rich.table import Table

    drawn = Table(
        box=box.SIMPLE_HEAD, title="With the head against without it", title_justify="left", padding=(0, 1, 0, 0)
    )
    drawn.add_column("prompt", no_wrap=True, max_width=14)
    for name in (
        "identical\ntokens",
        "accept\nlength",
        "acceptance\nby position",
        "tokens/s\nwith",
        "tokens/s\nwithout",
        "\ngain",
    ):
        drawn.add_column(name, justify="right", no_wrap=True)
    for row in [*out["prompts"], out]:
        name = "all" if row["prompt"] is None else row["prompt"].strip().splitlines()[0]
        drawn.add_row(
            name,
            "[green]yes[/]" if row["identical"] else "[red]no[/]",
            f"{row['accept_length']:.2f}" if row["accept_length"] is not None else "-",
            " ".join(f"{rate:.2f}" for rate in row["acceptance"]),
            f"{row['tokens_per_second']:.0f}",
            f"{row['tokens_per_second_without']:.0f}",
            f"{row['speedup']:.2f}x",
            end_section=row is out["prompts"][-1],
        )
    return drawn
