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
        advice: what to do: one sentence, without its full stop where a command follows.
        tensors: checkpoint keys; empty where the finding is about a file as a whole.
        command: the command that does it, ready to paste; "" where there is none. Words in capitals are the user's
            to fill in.
    """

    code: str
    severity: Severity
    message: str
    advice: str
    tensors: tuple[str, ...] = ()
    command: str = ""

    @property
    def fix(self) -> str:
        """Advice and command together."""
        return f"{self.advice}: {self.command}" if self.command else self.advice
