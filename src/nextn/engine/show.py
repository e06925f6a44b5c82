"""Show a decode on a terminal: text as it comes, draft tokens coloured, and one line of figures at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

from rich.console import Console

from nextn.engine.stream import Detokenizer
from nextn.engine.text import Tokenizer
from nextn.generation import Generation, Step

Kind = Literal["own", "accepted", "rejected"]
STYLED: dict[Kind, tuple[str, str]] = {
    "own": ("", ""),
    "accepted": ("\x1b[32m", "\x1b[0m"),
    "rejected": ("\x1b[9;31m", "\x1b[0m"),
}
MARKED: dict[Kind, tuple[str, str]] = {"own": ("", ""), "accepted": ("{+", "+}"), "rejected": ("[-", "-]")}
"""Where colours cannot be shown: the marks of ``git diff --word-diff``."""


def colours(out: TextIO) -> bool:
    """Whether styles reach the reader: a terminal that can, without NO_COLOR, or FORCE_COLOR."""
    console = Console(file=out)
    return console.color_system is not None and not console.no_color


def legend(out: TextIO) -> str:
    """What the forms of draft tokens mean, in the form that `Printer` uses on `out`."""
    if colours(out):
        return (
            "Green: draft tokens that the model agreed with. Red: the first that it did not. Plain: the model's own "
            "next token."
        )
    return (
        "{+ +}: draft tokens that the model agreed with. [- -]: the first that it did not. Unmarked: the model's own "
        "next token."
    )


class Printer:
    """Writes a stream of steps.

    With `mark_drafts` each round shows its accepted draft tokens, the first rejected one, and the target's own token;
    the text without the rejected ones is the text generated, cut where a stop cuts it.

    Args:
        out: where to write.
        tokenizer: None prints ids.
        prompt: the prompt's ids.
    """

    def __init__(self, out: TextIO, tokenizer: Tokenizer | None, prompt: Sequence[int], *, mark_drafts: bool) -> None:
        self.out, self.tokenizer, self.mark_drafts = out, tokenizer, mark_drafts
        self.forms = STYLED if colours(out) else MARKED
        self.pieces = Detokenizer(tokenizer.decode, prompt) if tokenizer is not None and mark_drafts else None
        self.held: deque[tuple[str, Kind]] = deque()

    def step(self, step: Step) -> None:
        """Write what one forward gave."""
        if self.mark_drafts:
            self._hold(step)
            self._release(len(step.text) if self.tokenizer is not None else None)
        elif self.tokenizer is None:
            self.out.write("".join(f"{token} " for token in step.tokens))
        else:
            self.out.write(step.text)
        self.out.flush()

    def end(self) -> None:
        """Finish the line."""
        self.out.write("\n")
        self.out.flush()

    def _hold(self, step: Step) -> None:
        drafts = step.round.drafts if step.round is not None else ()
        accepted = step.round.accepted if step.round is not None else 0
        for at, token in enumerate(step.tokens):
            if at == accepted and accepted < len(drafts):
                self.held.append((self._single(drafts[accepted]), "rejected"))
            self.held.append((self._piece(token), "accepted" if at < accepted else "own"))

    def _release(self, count: int | None) -> None:
        """Write held pieces up to `count` characters of generated text (None: all): stops and undecided ends hold back
        what the plain text holds back."""
        left = sum(len(piece) for piece, _ in self.held) if count is None else count
        while self.held and left > 0:
            piece, kind = self.held.popleft()
            if kind != "rejected":
                if len(piece) > left:
                    self.held.appendleft((piece[left:], kind))
                    piece = piece[:left]
                left -= len(piece)
            if piece:
                before, after = self.forms[kind]
                self.out.write(f"{before}{piece}{after}")

    def _piece(self, token: int) -> str:
        return self.pieces.push(token) if self.pieces is not None else f"{token} "

    def _single(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special=False) if self.tokenizer is not None else f"{token} "


def summary(result: Generation, memory: Mapping[str, int]) -> str:
    """One line: tokens, speed, accept length, acceptance by position, memory."""
    count = len(result.tokens)
    parts = [f"{count} token{'s' * (count != 1)} in {result.seconds:.2f} s ({result.tokens_per_second:.1f} tokens/s)"]
    if result.accept_length is not None:
        rates = " ".join(f"{rate:.2f}" for rate in result.acceptance)
        rounds = f"{result.rounds} round{'s' * (result.rounds != 1)}"
        parts.append(f"{rounds}, accept length {result.accept_length:.2f}, acceptance {rates}")
    parts.append(f"weights {memory['weight_bytes'] / 1e6:.1f} MB")
    if memory["draft_weight_bytes"]:
        parts.append(
            f"of them the separate draft {memory['draft_weight_bytes'] / 1e6:.1f} MB; "
            f"natively {memory['native_weight_bytes'] / 1e6:.1f} MB in all"
        )
    return "[" + "; ".join(parts) + "]"
