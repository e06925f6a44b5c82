"""`nextn inspect`: read the options, examine, print, and choose the exit code."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

from nextn.assets import embedded_model
from nextn.checkpoint.source import Checkpoint, open_checkpoint
from nextn.errors import NextnError
from nextn.inspect.diff import diff
from nextn.inspect.engines.versions import parse_engine
from nextn.inspect.examine import examine
from nextn.inspect.facts import gather
from nextn.inspect.memory import memory
from nextn.inspect.tensormap import tensor_map

QUIET_SECONDS, LINE_SECONDS = 2.0, 10.0
EPILOG = """
Examples:\n
\b
  nextn inspect Qwen/Qwen3.5-4B
  nextn inspect ./checkpoint --engine sglang --strict
  nextn inspect ./finetune --diff Qwen/Qwen3.5-4B --json
"""


def inspect(
    source: Annotated[
        str | None,
        typer.Argument(help="Folder, hub repository, safetensors or GGUF file; default: the embedded model."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="Judge for one engine, NAME or NAME==VERSION; also decides the exit code.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count for the exit code.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor of the head.")] = False,
    values: Annotated[
        bool, typer.Option("--values", help="Read the weights and check that they are plausible.")
    ] = False,
    other: Annotated[str | None, typer.Option("--diff", help="Compare with the head of another checkpoint.")] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, max=4096, help="Tensor-parallel ranks, for memory a rank.")] = 1,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")] = None,
    token: Annotated[str | None, typer.Option(help="Access token for the hub.", envvar="HF_TOKEN")] = None,
) -> None:
    """Say what MTP head a checkpoint carries and which engines run it."""
    name, version = parse_engine(engine) if engine else (None, None)
    if source == "":
        raise NextnError("The source is empty.", "Name a folder, a file or a hub repository.")
    checkpoint = _open(source if source is not None else str(embedded_model()), revision, token)
    report = examine(
        checkpoint, {name: version} if name and version else {}, values=_progress("values") if values else None
    )
    compared = diff(report.facts, gather(_open(other, None, token))) if other else None
    cost = memory(report.facts, tp)
    if as_json:
        printed = report.as_json() | {"memory": cost.as_json()}
        if tensors:
            printed["tensor_map"] = list(tensor_map(report.case))
        if compared is not None:
            printed["diff"] = compared.as_json()
        print(json.dumps(printed, indent=2))
    else:
        from rich.console import Console

        from nextn.inspect.report import show

        show(
            report,
            Console(highlight=False, markup=False, emoji=False),
            engine=name,
            memory=cost,
            tensors=tensor_map(report.case) if tensors else None,
            diff=compared,
        )
    bad = ("error", "warning") if strict else ("error",)
    refused = name is not None and report.engines[name].verdict in ("fails", "unsupported")
    if refused or any(f.severity in bad for f in report.findings):
        raise typer.Exit(1)


def _open(source: str, revision: str | None, token: str | None) -> Checkpoint:
    try:
        return open_checkpoint(source, revision=revision, token=token, progress=_progress("headers"))
    finally:
        _clear()


def _progress(what: str) -> Callable[[int, int], None]:
    """A counter on a terminal's error stream; elsewhere a line every few seconds, from the third on."""
    on_terminal = sys.stderr.isatty()
    last = time.monotonic() - LINE_SECONDS + QUIET_SECONDS

    def report(done: int, total: int) -> None:
        nonlocal last
        if on_terminal:
            print(f"\r{what}: {done} of {total} ", end="", file=sys.stderr, flush=True)
        elif (now := time.monotonic()) - last >= LINE_SECONDS:
            last = now
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return report


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


inspect.__doc__ = (inspect.__doc__ or "") + "\n" + EPILOG
