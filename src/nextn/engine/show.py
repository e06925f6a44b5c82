"""Show a decode on a terminal: text as it comes, draft tokens coloured, and one line of figures at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from nextn.api import Generation, Step
from nextn.engine.stream import Detokenizer
from nextn.engine.text import Tokenizer

ACCEPTED, REJECTED = "green", "red strike"


class Printer:
    """Writes a stream of steps.

    With `colour_drafts` each round shows its accepted draft tokens green, the first rejected one red and struck
    through, and the target's own token plain.

    Args:
        out: where to write; colours only where that is a terminal (or FORCE_COLOR is set), brackets elsewhere.
        tokenizer: None prints ids.
        prompt: the prompt's ids.
    """

    def __init__(self, out: TextIO, tokenizer: Tokenizer | None, prompt: Sequence[int], *, colour_drafts: bool) -> None:
        self.out, self.tokenizer, self.colour_drafts = out, tokenizer, colour_drafts
        self.console = Console(file=out, highlight=False, soft_wrap=True)
        self.pieces = Detokenizer(tokenizer.decode, prompt) if tokenizer is not None and colour_drafts else None

    def step(self, step: Step) -> None:
        """Write what one forward gave."""
        if self.colour_drafts:
            self.console.print(self.coloured(step), end="")
        elif self.tokenizer is None:
            self.out.write("".join(f"{token} " for token in step.tokens))
        else:
            self.out.write(step.text)
        self.out.flush()

    def coloured(self, step: Step) -> Text:
        """One round as text with styles."""
        text = Text()
        drafts = step.round.drafts if step.round is not None else ()
        accepted = step.round.accepted if step.round is not None else 0
        for at, token in enumerate(step.tokens):
            if at < accepted:
                self._add(text, self._piece(token), ACCEPTED, "")
            else:
                if at == accepted and accepted < len(drafts):
                    self._add(text, self._single(drafts[accepted]), REJECTED, "[-{}-]")
                self._add(text, self._piece(token), "", "")
        return text

    def end(self) -> None:
        """Finish the line."""
        if self.pieces is not None:
            self.out.write(self.pieces.flush())
        self.out.write("\n")
        self.out.flush()

    def _add(self, text: Text, piece: str, style: str, plain_form: str) -> None:
        if plain_form and not self.console.is_terminal:
            piece = plain_form.format(piece)
        text.append(piece, style=style)

    def _piece(self, token: int) -> str:
        return self.pieces.push(token) if self.pieces is not None else f"{token} "

    def _single(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special=False) if self.tokenizer is not None else f"{token} "


def summary(result: Generation, memory: Mapping[str, int]) -> str:
    """One line: tokens, speed, accept length, acceptance by position, memory."""
    parts = [f"{len(result.tokens)} tokens in {result.seconds:.2f} s ({result.tokens_per_second:.1f} tokens/s)"]
    if result.accept_length is not None and result.acceptance:
        rates = " ".join(f"{rate:.2f}" for rate in result.acceptance)
        parts.append(f"{result.rounds} rounds, accept length {result.accept_length:.2f}, acceptance {rates}")
    parts.append(f"weights {memory['weight_bytes'] / 1e6:.1f} MB")
    if memory["draft_weight_bytes"]:
        parts.append(
            f"of them the separate draft {memory['draft_weight_bytes'] / 1e6:.1f} MB; "
            f"natively {memory['native_weight_bytes'] / 1e6:.1f} MB in all"
        )
    return "[" + "; ".join(parts) + "]"
