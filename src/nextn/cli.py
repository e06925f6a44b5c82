"""The command line: one flat table from command to function. No logic lives here.

Only the command that is asked for is imported, so that `nextn inspect` starts without torch.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from nextn import __version__
from nextn.errors import NextnError

COMMANDS: dict[str, tuple[str, str]] = {
    "cache": ("nextn.train.command:cache", "Keep a target's hidden states on disk, to train a head from them."),
    "demo": ("nextn.engine.demo:demo", "Run the whole story on the embedded model, offline."),
    "eval": ("nextn.train.eval_command:eval_", "Say how many of a head's draft tokens its target accepts on a text."),
    "extract": ("nextn.surgery.command:extract", "Take a checkpoint's MTP head out as a folder of its own."),
    "generate": ("nextn.engine.command:generate", "Decode with a checkpoint's own MTP head, losslessly."),
    "inspect": ("nextn.inspect.command:inspect", "Say what MTP head a checkpoint carries and which engines run it."),
    "merge": ("nextn.surgery.command:merge", "Put an MTP head into a checkpoint, quantised or not."),
    "regenerate": (
        "nextn.train.regenerate_command:regenerate",
        "Write training data that the target answered itself, from prompts.",
    ),
    "train": ("nextn.train.command:train", "Train an MTP head the way an engine runs it."),
    "verify": (
        "nextn.verify.command:verify",
        "Prove that a head is whole, that an engine loads it, and that it is wired right.",
    ),
}
"""command -> (``module:function``, one line of help)."""


class ClosedPipeError(Exception):
    """The reader of the output (head, less) has what it wanted. Not an OSError, which the library would take."""


def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    command: Callable[..., Any] = getattr(importlib.import_module(module), function)

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            raise ClosedPipeError from None

    return run


def _version(asked: bool) -> None:
    if asked:
        print(f"nextn {__version__}")
        raise typer.Exit


def nextn(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Inspect, train, merge, verify and decode with the MTP heads that language models carry."""


def build(asked: str | None) -> typer.Typer:
    """The application, with every command listed and only `asked` imported.

    Args:
        asked: name of the command that will run; others are listed by their line of the table alone.
    """
    app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(nextn)
    for name, (target, line) in COMMANDS.items():
        if name == asked:
            app.command(name, short_help=line)(_load(target))
        else:
            app.command(name, help=line)(lambda: None)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run a command; an expected error becomes two sentences and an exit code.

    Args:
        arguments: the command line without the program's name; None for the process's own.
    """
    given = sys.argv[1:] if arguments is None else arguments
    asked = next((word for word in given if not word.startswith("-")), None)
    try:
        ended = build(asked)(given, prog_name="nextn", standalone_mode=False)
        sys.stdout.flush()
        code = ended if isinstance(ended, int) else 0
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # Under torchrun; a thread of PyTorch that still runs can abort an interpreter that shuts down around it.
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)
    except NextnError as error:
        print(f"error: {error.what}", file=sys.stderr)
        if error.fix:
            print(f"       {error.fix}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ClosedPipeError, BrokenPipeError):
        # Nothing more can be printed, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if "NEXTN_TRACEBACK" in os.environ:
            raise
        about = f"{error.filename}: " if error.filename else ""
        print(f"error: {about}{error.strerror or error}.", file=sys.stderr)
        print("       Check the disk and the permissions.", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if (told := getattr(error, "format_message", None)) is not None:
            # A usage error of the command-line library.
            if type(error).__name__ == "NoArgsIsHelpError":
                print(told())
                sys.exit(2)
            name = f" {asked}" if asked in COMMANDS else ""
            print(f"error: {told().rstrip('.')}.", file=sys.stderr)
            print(f"       See `nextn{name} --help`.", file=sys.stderr)
            sys.exit(2)
        if type(error).__name__ == "Abort":
            sys.exit(130)
        if "NEXTN_TRACEBACK" in os.environ:
            raise
        short = ("DefaultCPUAllocator", "failed to map segment", "Cannot allocate memory")
        if type(error).__name__ in ("OutOfMemoryError", "MemoryError") or any(s in str(error) for s in short):
            print("error: The memory ran out.", file=sys.stderr)
            print("       Ask for less at once (batch sizes, lengths), or free memory.", file=sys.stderr)
            sys.exit(2)
        print(f"error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        print("       This is a defect of nextn; run again with NEXTN_TRACEBACK=1 and report it.", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
