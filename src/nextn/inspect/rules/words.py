"""Turn counts and lists of names into words."""

from __future__ import annotations

from collections.abc import Sequence


def plural(count: int, one: str, many: str | None = None) -> str:
    """``plural(1, "tensor") == "1 tensor"``, ``plural(2, "tensor") == "2 tensors"``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listing(names: Sequence[str], most: int = 3) -> str:
    """The first few names and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def together(names: Sequence[str]) -> str:
    """``together(["a", "b", "c"]) == "a, b and c"``."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
