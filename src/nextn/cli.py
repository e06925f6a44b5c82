"""The command line: one flat table from command to function. No logic lives here.

Functions are imported when their command is called, so that `nextn inspect` starts without torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click
import typer
from typer.core import TyperGroup

from nextn import __version__
from nextn.errors import NextnError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("nextn.engine.demo:demo", "Run the whole story on the embedded model, offline."),
    "generate": ("nextn.engine.command:generate", "Decode with a checkpoint's own MTP head, losslessly."),
    "inspect": ("nextn.inspect.command:inspect", "Say what MTP head a checkpoint carries and which engines run it."),
}
"""command -> (``module:function``, one line of help)."""


class Commands(TyperGroup):
    """Loads each command on first use; its order is the table's."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        target, _ = COMMANDS[cmd_name]
        module, function = target.split(":")
        app = typer.Typer(add_completion=False, rich_markup_mode="rich")
        app.command(cmd_name)(getattr(importlib.import_module(module), function))
        return typer.main.get_command(app)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


app = typer.Typer(cls=Commands, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def _version(asked: bool) -> None:
    if asked:
        print(f"nextn {__version__}")
        raise typer.Exit


@app.callback()
def nextn(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Inspect, train, merge, verify, decode, serve and measure the MTP heads that language models carry."""


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: run a command; an expected error becomes two sentences and an exit code."""
    try:
        return app(arguments)
    except NextnError as error:
        print(f"error: {error.what}", file=sys.stderr)
        if error.fix:
            print(f"       {error.fix}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
