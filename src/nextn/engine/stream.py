"""Turn ids into text as they come, one at a time, and find where a stop string ends it.

A run of accepted draft tokens is pushed token by token, so it is cut where decoding one token a step would have
stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nextn.engine.text import Tokenizer
from nextn.errors import NextnError

REPLACEMENT = "\ufffd"
"""What decoders show for bytes that are not (or not yet) a character."""

CONTEXT = 5
"""Prompt ids kept before the output, for decoders that treat a first token differently (vLLM keeps as many)."""

LONGEST_CHARACTER = 4
"""Bytes of UTF-8, and so tokens at most."""


class Detokenizer:
    """Decodes ids incrementally: the pieces, put together, are the decoded whole.

    Trailing replacement characters are held back, since the next token may complete them. Decoded again at each step
    are only the ids since the last complete character and the piece before them. Where a decoder changes what it
    showed before (byte-fallback vocabularies do, at invalid bytes after valid ones), the text shown stays.

    Args:
        decode: ids to text.
        prompt_ids: what stands before the output. Its text is never shown, nor a character that it begins.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        # The context does not begin inside a character: some decoders then spoil the bytes that follow.
        for count in range(CONTEXT, CONTEXT + LONGEST_CHARACTER):
            self._ids = list(prompt_ids[-count:])
            if not decode(self._ids).startswith(REPLACEMENT):
                break
        self._context = len(self._ids)
        self._shown = len(decode(self._ids))

    def push(self, *ids: int) -> str:
        """The text that further ids settle; "" while a character is incomplete."""
        self._ids += ids
        text = self._decode(self._ids)
        settled = len(text.rstrip(REPLACEMENT))
        piece = text[self._shown : settled]
        self._shown = max(self._shown, settled)
        if piece and settled == len(text):
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = len(self._decode(self._ids))
        return piece

    def flush(self) -> str:
        """What is still held back, at the end of the output."""
        piece = self._decode(self._ids)[self._shown :]
        self._shown += len(piece)
        return piece


class TextStream:
    """The text of one request while its tokens come.

    A stop string ends the text where it begins, and the output with the token that completed it. Text that may be
    the beginning of a stop string is held back until the next token decides. Of several stop strings, the one that is
    complete first counts; of those complete at once, the longest.

    Args:
        tokenizer: None for checkpoints without one: there is no text, and stop strings are refused.
        prompt_ids: the prompt.
        stop: stop strings.
        min_tokens: stop strings completed within the first so many tokens do not count.
        skip_special: leave special tokens out of the text.

    Attributes:
        tokens: how many ids were pushed.
        stopped: the stop string that ended the text, None so far.

    Raises:
        NextnError: stop strings without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special: bool = True,
    ) -> None:
        if tokenizer is None and stop:
            raise NextnError("The checkpoint has no tokenizer, so no stop string can be found.", "Give stop ids.")
        self.tokens = 0
        self.stopped: str | None = None
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(lambda ids: tokenizer.decode(ids, skip_special=skip_special), prompt_ids)
        )
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._parts: list[str] = []
        self._sent = 0
        self._held = ""
        self._barred = 0

    @property
    def text(self) -> str | None:
        """The text given out so far, None without a tokenizer."""
        return None if self._detokenizer is None else "".join(self._parts)

    def push(self, id: int) -> str:
        """The text that can be shown after one more token; then look at `stopped`: the token is the last if set."""
        if self._detokenizer is None or self.stopped is not None:
            return ""
        self.tokens += 1
        return self._advance(self._detokenizer.push(id), last=False)

    def finish(self) -> str:
        """The rest of the text, when the output ended for another reason."""
        if self._detokenizer is None or self.stopped is not None:
            return ""
        return self._advance(self._detokenizer.flush(), last=True)

    def _advance(self, piece: str, *, last: bool) -> str:
        self._held += piece
        if self.tokens <= self._min_tokens:
            self._barred = self._sent + len(self._held)
        found = self._find()
        if found is not None:
            begin, self.stopped = found
            out, self._held = self._held[:begin], ""
        else:
            keep = 0 if last else self._undecided()
            cut = len(self._held) - keep
            out, self._held = self._held[:cut], self._held[cut:]
        self._sent += len(out)
        self._parts.append(out)
        return out

    def _find(self) -> tuple[int, str] | None:
        """Where the stop string that is complete first begins in the text held, and which it is."""
        barred = self._barred - self._sent
        matches = []
        for stop in self._stop:
            begin = self._held.find(stop, max(0, barred - len(stop) + 1))
            if begin >= 0:
                matches.append((begin + len(stop), begin, stop))
        if not matches:
            return None
        _, begin, stop = min(matches)
        return begin, stop

    def _undecided(self) -> int:
        """Length of the longest end of the text held that is the beginning of a stop string."""
        for length in range(min(len(self._held), max(map(len, self._stop), default=0)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
