"""What a finding is, and the verdict that an engine gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
RANK: dict[str, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is so about a checkpoint.

    Attributes:
        code: slug that says the kind; documented in docs/inspect.md.
        message: one or two sentences on what is so.
        fix: what to do, a command where there is one.
        tensors: checkpoint keys, or list entries where the finding is about those.
    """

    code: str
    severity: Severity
    message: str
    fix: str
    tensors: tuple[str, ...] = ()
