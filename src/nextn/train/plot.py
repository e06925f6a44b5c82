"""Draw an evaluation: acceptance by position, and accept length by context length and by domain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nextn.errors import NextnError

MEASURES = (
    ("greedy", "teacher-forced, greedy"),
    ("simulated", "teacher-forced, by rounds"),
    ("sampled", "teacher-forced, at temperature"),
    ("sampled_simulated", "teacher-forced, at temperature, by rounds"),
    ("decode", "decoded, greedy"),
    ("decode_sampled", "decoded, at temperature"),
)
"""Name -> what it is called on a screen and in a picture; ``greedy`` is the top of the JSON object."""


def measures(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Title -> counts of every measure that an evaluation's JSON object holds."""
    parts = {"greedy": found, **found}
    return {title: parts[name] for name, title in MEASURES if parts.get(name)}


def span(bucket: Mapping[str, Any]) -> str:
    """``513-2048`` or ``131073+``."""
    return f"{bucket['from']}-{bucket['to']}" if bucket["to"] is not None else f"{bucket['from']}+"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the picture of an evaluation's JSON object as PNG.

    Raises:
        NextnError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 2 + bool(found["domains"])
    figure = Figure(figsize=(4.6 * panels, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    drawn = measures(found)
    spans = [span(b) for b in sorted((b for c in drawn.values() for b in c["buckets"]), key=lambda b: b["from"])]
    place = {name: at for at, name in enumerate(dict.fromkeys(spans))}
    for title, counts in drawn.items():
        acceptance = counts["acceptance"]
        axes[0].plot(range(1, len(acceptance) + 1), acceptance, marker="o", label=title)
        at = [place[span(b)] for b in counts["buckets"]]
        axes[1].plot(at, [b["accept_length"] for b in counts["buckets"]], marker="o", label=title)
        if panels == 3:
            axes[2].plot(
                list(counts["domains"]),
                [c["accept_length"] for c in counts["domains"].values()],
                marker="o",
                linestyle="none",
                label=title,
            )
    axes[0].set(xlabel="draft token", ylabel="acceptance (whole prefix)", ylim=(0, 1.02))
    axes[0].set_xticks(range(1, found["draft_tokens"] + 1))
    axes[1].set_xticks(range(len(place)), list(place))
    for axis, label in zip(axes[1:], ("context length (tokens)", "domain"), strict=False):
        axis.set(xlabel=label, ylabel="accept length", ylim=(1, found["draft_tokens"] + 1))
        axis.tick_params(axis="x", labelrotation=25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    for axis in axes:
        axis.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=140)
    except OSError as error:
        raise NextnError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from None
