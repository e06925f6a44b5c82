"""Print a report on a screen: the verdict first, then facts, findings with fixes, and each engine's command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nextn.inspect.diff import Diff
from nextn.inspect.engines.table import ENGINE
from nextn.inspect.examine import Report
from nextn.inspect.findings import Finding
from nextn.inspect.memory import Memory
from nextn.inspect.rules.words import plural, together

COLOURS = {
    "error": "bold red",
    "warning": "yellow",
    "info": "cyan",
    "works": "green",
    "degraded": "yellow",
    "fails": "bold red",
    "unsupported": "dim",
    "unknown": "dim",
}


def safe(text: str) -> str:
    """Text from a file, made harmless for a terminal: control characters and lone surrogates become ``?``."""
    return "".join(c if c.isprintable() else "?" for c in text.encode("utf-8", "replace").decode())


def words(text: str, style: str = "") -> Text:
    return Text(safe(text), style)


def headline(report: Report) -> tuple[str, str]:
    """The answer in one sentence, and its colour."""
    facts = report.facts
    errors = sum(f.severity == "error" for f in report.findings)
    warnings = sum(f.severity == "warning" for f in report.findings)
    if facts.family is None:
        if report.case.is_gguf and facts.checkpoint.absent_files:
            return "The first piece of this GGUF, which names the model, is not there.", "bold red"
        return "No MTP family that nextn knows.", "yellow"
    title = facts.family.title
    if not facts.head:
        if facts.foreign:
            return f"{title}: another drafter stands where the MTP head should be.", "bold red"
        if not facts.checkpoint.files and not facts.checkpoint.absent_files:
            return f"{title}: there are no weights.", "bold red"
        if facts.missing_by_index or (facts.in_the_dark and facts.unseen_files):
            return f"{title}: the head's files are missing or damaged.", "bold red"
        return (
            (f"{title}: the MTP head is missing.", "bold red")
            if facts.ships_head
            else (f"{title}: no MTP head.", "cyan")
        )
    state = "a complete" if facts.complete else "an incomplete"
    size = f"{facts.found} of {plural(len(facts.expected), 'tensor')}, {megabytes(facts.nbytes)}"
    sentence = f"{title}: {state} MTP head ({size})"
    if errors:
        return f"{sentence}, with {plural(errors, 'error')}.", "bold red"
    if warnings:
        return f"{sentence}, with {plural(warnings, 'warning')}.", "yellow"
    less = [v for v in ("fails", "degraded") if any(e.verdict == v for e in report.engines.values())]
    if less:
        engines = [ENGINE[name].title for name, e in report.engines.items() if e.verdict in less]
        return f"{sentence}. Nothing to fix, but not every engine runs it whole: see {together(engines)}.", "yellow"
    return f"{sentence}. Nothing to fix.", "bold green"


def megabytes(count: int) -> str:
    """``megabytes(811_000_000) == "811 MB"``."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def wrapped(parts: Sequence[str], width: int) -> str:
    """Parts with commas between, broken into lines between parts only, so that a number keeps its unit."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) + 2 > width:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] += f", {part}" if lines[-1] else part
    return "\n".join(lines)


def show(
    report: Report,
    console: Console,
    *,
    engine: str | None = None,
    memory: Memory | None = None,
    tensors: Iterable[dict[str, Any]] | None = None,
    diff: Diff | None = None,
) -> None:
    """Print everything that was asked for."""
    sentence, colour = headline(report)
    console.print(words(sentence, style=colour))
    console.print()
    console.print(_facts(report, memory, console.width))
    if report.findings:
        console.print()
    for finding in report.findings:
        _finding(console, finding)
    console.print()
    for name, verdict in report.engines.items():
        if engine is not None and name != engine:
            continue
        line = Text()
        line.append(safe(f"{ENGINE[name].title} {verdict.version}").ljust(22))
        line.append(verdict.verdict, COLOURS[verdict.verdict])
        if verdict.reasons:
            line.append(f"  {', '.join(verdict.reasons)}")
        if verdict.basis == "documentation" and verdict.verdict not in ("unknown", "unsupported"):
            line.append("  (from documentation)", "dim")
        console.print(line, soft_wrap=True)
        if verdict.error:
            console.print(Padding(words(verdict.error, "red"), (0, 0, 0, 4)))
        for note in verdict.notes:
            console.print(Padding(words(note, "dim"), (0, 0, 0, 4)))
        if verdict.command and verdict.verdict in ("works", "degraded", "unknown"):
            console.print(words(f"    {verdict.command}"), soft_wrap=True)
    if report.engines and engine is None:
        console.print(words("Verdicts rest on reading the engines' sources, not on running them.", "dim"))
    if tensors is not None:
        console.print()
        _tensors(console, tensors)
    if diff is not None:
        console.print()
        _diff(console, diff)


def _facts(report: Report, memory: Memory | None, width: int) -> Table:
    facts = report.facts
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    names = report.as_json()["architectures"]
    table.add_row("source", safe(facts.checkpoint.source))
    table.add_row("family", f"{facts.family.name}  ({facts.family.block})" if facts.family else "unknown")
    if names:
        table.add_row("architecture", safe(", ".join(str(n) for n in names[:3])))
    if facts.family is not None:
        by = f"{facts.declared} by {facts.declared_by}" if facts.declared_by else "nothing"
        table.add_row("declared layers", by)
        table.add_row("layers found", str(len(facts.layers)))
    if facts.dtypes:
        table.add_row("stored as", ", ".join(f"{d} ({n})" for d, n in facts.dtypes.items()))
    scheme = report.case.scheme
    if scheme is not None:
        head = {"none": "not quantised", "full": "quantised", "mixed": "partly quantised"}[report.case.claims.stored]
        table.add_row(
            "quantisation",
            safe(f"{scheme.method} {scheme.algorithm}".strip()) + f" in {scheme.file}; the head is {head}",
        )
    remote = facts.checkpoint.remote
    if remote is not None:
        table.add_row(
            "read", f"{remote.bytes_read:,} bytes in {remote.requests} requests, commit {safe(remote.commit[:12])}"
        )
    if memory is not None and facts.head:
        parts = [f"{part} {megabytes(n)}" for part, n in memory.parts.items()]
        table.add_row("memory", wrapped(parts, width - 22))
        if memory.ranks > 1:
            table.add_row(f"a rank of {memory.ranks}", megabytes(memory.per_rank_bytes))
        extra = memory.embedding_bytes + memory.output_head_bytes
        if extra:
            each = f", {megabytes(-(-extra // memory.ranks))} a rank" if memory.ranks > 1 else ""
            table.add_row("a second load adds", f"{megabytes(extra)} of embedding and output head{each}")
    return table


def _finding(console: Console, finding: Finding) -> None:
    line = Text()
    line.append(finding.severity, COLOURS[finding.severity])
    line.append(f" {finding.code}: ", "bold")
    line.append(safe(finding.message))
    console.print(line)
    console.print(Padding(words(f"fix: {finding.advice}{':' if finding.command else ''}"), (0, 0, 0, 4)))
    if finding.command:
        console.print(words(f"        {finding.command}"), soft_wrap=True)


def _tensors(console: Console, entries: Iterable[dict[str, Any]]) -> None:
    for e in entries:
        console.print(words(e["key"]), soft_wrap=True)
        told = [
            e["name"] or "-",
            "x".join(map(str, e["shape"])),
            e["dtype"],
            f"{e['bytes']:,} bytes",
            e["file"],
            e["stored"],
        ]
        if e["claimed"]:
            told.append(f"declared {e['claimed']}" + (f" by {e['rule']}" if e["rule"] else ""))
        console.print(words("    " + "  ".join(told), "dim"), soft_wrap=True)


def _diff(console: Console, diff: Diff) -> None:
    if diff.identical:
        console.print(words(f"The head is identical, byte for byte, to that of {diff.other}.", "bold yellow"))
        return
    if diff.note:
        console.print(words(diff.note))
    counts = f"{len(diff.equal)} equal, {len(diff.changed)} changed"
    console.print(
        words(f"Against {diff.other}: {counts}, {len(diff.missing)} only here, {len(diff.added)} only there.")
    )
    for change in diff.changed[:200]:
        by = f"relative change {change.relative:.3g}" if change.relative is not None else "cannot be compared"
        console.print(words(f"    {change.name}  {by}{'  ' + change.note if change.note else ''}"), soft_wrap=True)
    for name in diff.missing[:50]:
        console.print(words(f"    {name}  only here"), soft_wrap=True)
    for name in diff.added[:50]:
        console.print(words(f"    {name}  only there"), soft_wrap=True)
