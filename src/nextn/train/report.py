"""Write a training run's report: one HTML file that needs no other, made from the run's log alone."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nextn.errors import NextnError
from nextn.train.log import read_log
from nextn.train.plot import span

FILE = "report.html"
POINTS = 400
"""Of a curve at most; longer logs are thinned."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2330; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .9rem; border-bottom: 1px solid #d8dde6; }
td { text-align: right; font-variant-numeric: tabular-nums; } th, td:first-child { text-align: left; }
.up { color: #13703a; } .down { color: #a32020; } .charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.charts svg { width: 29rem; max-width: 100%; height: auto; } p.note { color: #5a6475; }
"""

Record = Mapping[str, Any]


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run's output folder.

    Args:
        folder: of the run; its log is in ``logs/``.
    Returns:
        the file's path.
    Raises:
        NextnError: no log there, or the file cannot be written.
    """
    records = read_log(folder / "logs")
    steps = [r for r in records if "loss" in r]
    evals = [r for r in records if "eval" in r]
    if not steps:
        raise NextnError(f"{folder} holds no log of a training run.", "Name the `output` folder of `nextn train`.")
    path = folder / FILE
    try:
        path.write_text(_page(folder.resolve().name, steps, evals), encoding="utf-8")
    except OSError as error:
        raise NextnError(f"{path} cannot be written: {error.strerror}.", "Check the folder.") from None
    return path


def _page(name: str, steps: Sequence[Record], evals: Sequence[Record]) -> str:
    last = steps[-1]
    title = f"Training of {html.escape(name)}"
    seconds = float(last["time"])
    parts = [
        f"<h1>{title}</h1>",
        f"<p>{last['step']:,} steps, {last['tokens']:,} tokens, {seconds / 60:.1f} minutes; "
        f"last loss {last['loss']:.4f}.</p>",
        _comparison(evals),
        "<h2>Course</h2>",
        f'<div class="charts">{"".join(_charts(steps, evals))}</div>',
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _comparison(evals: Sequence[Record]) -> str:
    """The before/after table, after being the evaluation with the highest accept length."""
    start: Record = next((e for e in evals if e["step"] == 0), {})
    before, limited = start.get("eval"), start.get("limited")
    trained = [e for e in evals if e["step"] > 0]
    if not trained:
        return '<p class="note">The run was not evaluated: set <code>eval</code> to a held-out file.</p>'
    best = max(trained, key=lambda e: e["eval"]["accept_length"])
    after = best["eval"]
    rows = [("accept length", before and before["accept_length"], after["accept_length"], "")]
    rows += [
        (f"acceptance of draft {i}", _at(before, "acceptance", i - 1), share, "%")
        for i, share in enumerate(after["acceptance"], 1)
    ]
    was = {span(b): b["accept_length"] for b in (before or {}).get("buckets", [])}
    rows += [(f"accept length, context {span(b)}", was.get(span(b)), b["accept_length"], "") for b in after["buckets"]]
    domains = (before or {}).get("domains", {})
    rows += [
        (f"accept length, {name}", domains.get(name, {}).get("accept_length"), counts["accept_length"], "")
        for name, counts in after["domains"].items()
    ]
    body = "".join(_row(*row) for row in rows)
    rival = limited or before
    beaten = rival is None or after["accept_length"] > rival["accept_length"]
    told = (
        f"<p>This run drafts from other ids than the head did before; from these it was accepted "
        f"{limited['accept_length']:.3f} before training.</p>"
        if limited is not None
        else ""
    )
    return (
        "<h2>Before and after</h2>\n<table><tr><th></th><th>before</th><th>after</th><th>change</th></tr>"
        f"{body}</table>"
        f'<p class="note">Greedy, teacher-forced, {after["rounds"]:,} positions of the held-out text, '
        f"{after['draft_tokens']} draft tokens. After is step {best['step']:,}, the one accepted best.</p>"
        + told
        + ("" if beaten else "<p>No step is accepted more than the head was before the first.</p>")
    )


def _at(found: Record | None, name: str, index: int) -> float | None:
    values = found[name] if found else []
    return values[index] if index < len(values) else None


def _row(name: str, before: float | None, after: float, unit: str) -> str:
    def shown(value: float | None, sign: str = "") -> str:
        if value is None:
            return "–"
        return f"{100 * value:{sign}.1f} {'points' if sign else '%'}" if unit else f"{value:{sign}.3f}"

    change = None if before is None else after - before
    kind = "" if not change else ' class="up"' if change > 0 else ' class="down"'
    return (
        f"<tr><td>{html.escape(name)}</td><td>{shown(before)}</td><td>{shown(after)}</td>"
        f"<td{kind}>{shown(change, '+')}</td></tr>"
    )


def _charts(steps: Sequence[Record], evals: Sequence[Record]) -> list[str]:
    depth = max(len(r["loss_by_step"]) for r in steps)
    losses = {f"draft {k + 1}": [(r["step"], _at(r, "loss_by_step", k)) for r in steps] for k in range(depth)}
    charts = [_chart("loss by draft step", {"all": [(r["step"], r["loss"]) for r in steps], **losses})]
    if evals:
        depth = max(len(r["eval"]["acceptance"]) for r in evals)
        shares = {f"draft {k + 1}": [(r["step"], _at(r["eval"], "acceptance", k)) for r in evals] for k in range(depth)}
        charts.append(_chart("acceptance by position", shares, marker="o"))
        length = {"": [(r["step"], r["eval"]["accept_length"]) for r in evals]}
        charts.append(_chart("accept length", length, marker="o"))
    charts.append(_chart("tokens per second", {"": [(r["step"], r["tokens_per_second"]) for r in steps]}, zero=True))
    charts.append(_chart("learning rate", {"": [(r["step"], r["lr"]) for r in steps]}, zero=True))
    return charts


def _chart(
    title: str, curves: Mapping[str, list[tuple[int, float | None]]], *, marker: str = "", zero: bool = False
) -> str:
    """Curves over steps as an SVG element; values that are missing or not finite leave gaps."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.1), layout="constrained")
    axis = figure.subplots()
    for label, points in curves.items():
        stride = math.ceil(len(points) / POINTS)
        kept = points[::stride] + ([points[-1]] if (len(points) - 1) % stride else [])
        values = [math.nan if y is None or not math.isfinite(y) else y for _, y in kept]
        axis.plot([x for x, _ in kept], values, marker=marker, markersize=3, linewidth=1.3, label=label)
    axis.set(title=title, xlabel="step")
    axis.grid(alpha=0.3)
    if zero:
        axis.set_ylim(bottom=0)
    if len(curves) > 1:
        axis.legend(fontsize="small")
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return out.getvalue()[out.getvalue().index("<svg") :]
