"""What steps and rounds must reach and aim for, as multiples of their floors, at batch 1 and K = 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """Times floor at most."""

    must: float
    aim: float


TARGETS: Mapping[str, Mapping[str, Target]] = {
    "4b": {"step": Target(1.52, 1.25), "round": Target(1.50, 1.25)},
    "9b": {"step": Target(1.30, 1.15), "round": Target(1.32, 1.15)},
    "0.8b": {"step": Target(3.2, 1.8), "round": Target(2.5, 1.6)},
}
TIMES_FASTER = {("0.8b", 1, "round"): 3.0}
"""Beside SGLang: how many times faster at least, by geometry, batch and step or round; elsewhere faster at all."""

WARM_START_UP = 20.0
"""Seconds from weights on the GPU to the first answer, below which it must stay with a warm cache of kernels."""


def ratio(row: Mapping[str, Any], what: str) -> float:
    """A row's step or round over its floor."""
    return float(row[f"{what}_ms"] / row[f"{what}_floor_ms"])


def target(row: Mapping[str, Any], what: str) -> Target | None:
    """What a row of decode.py is held to, None where nothing is set."""
    held = row["batch"] == 1 and row["draft_tokens"] == 3 and row["draft_vocab"] is None
    return TARGETS.get(row["geometry"], {}).get(what) if held else None
