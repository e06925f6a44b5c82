"""The command table: what is listed, what is imported, and how an error ends."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
import subprocess
import sys
import types

import pytest
import typer

from nextn import __version__, cli
from nextn.errors import NextnError


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A table of two commands in a module made here; returns what ran."""
    ran: list[str] = []
    module = types.ModuleType("nextn_test_commands")

    def good(name: str, times: int = typer.Option(1, "--times")) -> None:
        """The good command's own help."""
        ran.extend([name] * times)

    def bad(code: int) -> None:
        raise NextnError("The file is broken.", "Download it again.", exit_code=code)

    def interrupted() -> None:
        raise KeyboardInterrupt

    for function in (good, bad, interrupted):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    commands = {name: (f"{module.__name__}:{name}", f"Line of {name}.") for name in ("good", "bad", "interrupted")}
    monkeypatch.setattr(cli, "COMMANDS", commands | {"absent": ("nextn_no_such_module:x", "Line of absent.")})
    return ran


def exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_runs_the_command_with_its_options(table: list[str]) -> None:
    assert exit_code(["good", "x", "--times", "3"]) == 0
    assert table == ["x", "x", "x"]


def test_help_lists_every_command_in_order_without_importing_any(
    table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["--help"]) == 0
    out = capsys.readouterr().out
    places = [out.index(f"Line of {name}.") for name in ("good", "bad", "interrupted", "absent")]
    assert places == sorted(places)


def test_a_command_shows_its_own_help(table: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["good", "--help"]) == 0
    out = capsys.readouterr().out
    assert "The good command's own help." in out
    assert "--times" in out


@pytest.mark.parametrize("code", [1, 2])
def test_an_error_is_two_sentences_and_its_code(
    table: list[str], capsys: pytest.CaptureFixture[str], code: int
) -> None:
    assert exit_code(["bad", str(code)]) == code
    caught = capsys.readouterr()
    assert caught.err == "error: The file is broken.\n       Download it again.\n"
    assert caught.out == ""


@pytest.mark.parametrize("arguments", [["nope"], ["good"], ["good", "x", "--times", "many"], ["good", "x", "--odd"]])
def test_bad_usage_is_2(table: list[str], arguments: list[str]) -> None:
    assert exit_code(arguments) == 2
    assert table == []


def test_interrupt_is_130(table: list[str]) -> None:
    assert exit_code(["interrupted"]) == 130


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"nextn {__version__}\n"


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_entry_of_the_table_exists(name: str) -> None:
    module, _, function = cli.COMMANDS[name][0].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_help_has_examples_whose_options_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("  Examples:") + 1
    assert lines[start] == ""
    examples = list(itertools.takewhile(bool, lines[start + 1 :]))
    assert all(line.startswith("    ") for line in examples)
    commands = [re.sub(r"^.* -m nextn\.cli ", "nextn ", line.strip()) for line in examples]
    assert len(commands) >= 2
    command = typer.main.get_command(cli.build(name)).commands[name]  # type: ignore[attr-defined]
    known = {option for p in command.params for option in p.opts}
    for line in commands:
        words = shlex.split(line)
        assert words[:2] == ["nextn", name]
        assert {word for word in words if word.startswith("-") and word != "-"} <= known, line


def test_help_starts_without_torch_or_transformers() -> None:
    code = (
        "import sys\nfrom nextn import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_defect_is_two_sentences_unless_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("somewhere inside")

    monkeypatch.setattr("nextn.cli._load", lambda target: broken)
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[0] == "error: ZeroDivisionError: somewhere inside"
    monkeypatch.setenv("NEXTN_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["inspect"])
