"""The one exception that reaches a user: a sentence on what is wrong, a sentence on what to do."""

from __future__ import annotations


class NextnError(Exception):
    """Bad input or an unusable checkpoint.

    Args:
        what: one sentence on what is wrong.
        fix: one sentence on what to do about it.
        exit_code: 2 for bad usage or unreadable input, 1 when the answer to the question is "no".
    """

    def __init__(self, what: str, fix: str = "", *, exit_code: int = 2) -> None:
        super().__init__(f"{what} {fix}".strip())
        self.what = what
        self.fix = fix
        self.exit_code = exit_code
