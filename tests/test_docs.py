"""Every link in the documents leads somewhere, and every command that they name exists with its options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from nextn import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.md"), *ROOT.glob("src/**/*.md")]
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_and_result_files(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target
    for target in re.findall(r"benchmarks/[\w/.-]+\.(?:json|py)", text):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_commands_and_options(document: Path) -> None:
    blocks = re.findall(r"```\w*\n(.*?)```", document.read_text(), flags=re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in lines:
        words = line.split(" #")[0].split()
        if words[:1] != ["nextn"] or len(words) < 2 or words[1].startswith("-"):
            continue
        assert words[1] in cli.COMMANDS, line
        command = typer.main.get_command(cli.build(words[1])).commands[words[1]]  # type: ignore[attr-defined]
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
        used = {word.split("=")[0] for word in words[2:] if word.startswith("-") and len(word) > 1}
        assert used <= known, line
