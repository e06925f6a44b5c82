"""Refuse rows that cannot fit into memory before anything is loaded: the system would kill the run without a word."""

from __future__ import annotations

from nextn.engine.budget import free_bytes
from nextn.errors import NextnError
from nextn.models.config import DecoderConfig
from nextn.train.config import TrainConfig
from nextn.train.processes import Processes

TARGET_STATES, STEP_STATES = 3, 12
"""Hidden states a token that exist at once at least: in the target's pass, and of each draft step for its gradient.
The Qwen3.5-4B geometry takes about 50 a draft step (benchmarks/results/train-step-h200.json)."""
ROW_BYTES = 25
"""Of a token in a packed row: three int64 and a bool."""


def least_bytes(tokens: int, hidden: int, steps: int, element_bytes: int) -> int:
    """What one forward of packed tokens takes at least, weights aside; `steps` draft steps with their gradient."""
    return tokens * hidden * element_bytes * (TARGET_STATES + STEP_STATES * steps)


def require_room(
    config: TrainConfig, target: DecoderConfig, element_bytes: int, processes: Processes, *, steps: int, rows: int
) -> None:
    """Refuse what is sure not to fit.

    Args:
        element_bytes: of a hidden state's number, the smaller of target's and head's.
        steps: draft steps that are trained, 0 for the target alone.
        rows: packed rows that this process holds at once.
    Raises:
        NextnError: one forward over `batch_tokens`, or that many rows, take more than is free.
    """
    free = free_bytes(processes.device)
    needed = least_bytes(config.batch_tokens, target.hidden, steps, element_bytes)
    if needed > free:
        raise NextnError(
            f"One forward of batch_tokens = {config.batch_tokens:,} takes over {_gigabytes(needed)} of memory, "
            f"and {_gigabytes(free)} are free.",
            "Lower batch_tokens and raise accumulation by as much: a step has as many tokens then.",
        )
    needed = rows * config.batch_tokens * ROW_BYTES
    if needed > free:
        raise NextnError(
            f"The rows of a step take {_gigabytes(needed)} of memory, and {_gigabytes(free)} are free.",
            f"Lower accumulation = {config.accumulation:,}.",
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
