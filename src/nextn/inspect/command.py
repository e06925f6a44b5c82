"""`nextn inspect`: read the options, examine, print, and choose the exit code."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from nextn.assets import embedded_model
from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.examine import examine


def inspect(
    source: Annotated[
        str | None,
        typer.Argument(help="Folder, hub repository, safetensors or GGUF file; default: the embedded model."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count for the exit code.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")] = None,
    token: Annotated[str | None, typer.Option(help="Access token for the hub.", envvar="HF_TOKEN")] = None,
) -> None:
    """Say what MTP head a checkpoint carries and which engines run it."""
    report = examine(open_checkpoint(source or str(embedded_model()), revision=revision, token=token))
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    bad = ("error", "warning") if strict else ("error",)
    if any(f.severity in bad for f in report.findings):
        raise typer.Exit(1)
