"""What decoding gives: steps as they come, and the whole of a prompt's generation with its counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nextn.engine.request import Round, TokenLogprob


@dataclass
class Generation:
    """What one prompt gave. Counting as everywhere in nextn: the prefill's token is not a round.

    Attributes:
        text: None where there is no tokenizer.
        tokens: generated ids, the stop id that ended them included.
        prompt_tokens: length of the prompt.
        rounds: verify forwards that were needed; a step without draft tokens verifies nothing and is none.
        drafted, accepted: proposals verified, and those that matched.
        acceptance: by position i, the share of rounds in which d1..di were all accepted, of those that proposed di.
        seconds: wall time from prefill to the last token, of the whole batch that the prompt was decoded in.
        finish_reason: ``stop`` or ``length``; ``error`` where the prompt failed while others were decoded.
        error: what failed and what to do, where something did.
        draft_rounds: every round's drafts, how many were accepted, and the tokens kept.
        logprobs: one entry a token where asked for.
    """

    text: str | None
    tokens: list[int]
    prompt_tokens: int
    rounds: int
    drafted: int
    accepted: int
    acceptance: list[float]
    seconds: float
    prefill_seconds: float
    finish_reason: str | None
    error: str | None = None
    draft_rounds: list[Round] = field(default_factory=list, repr=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)

    @property
    def accept_length(self) -> float | None:
        """Tokens gained a verify, 1 + accepted / rounds; None at 0 rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over `seconds`."""
        return len(self.tokens) / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """The object that ``nextn generate --json`` prints."""
        out: dict[str, Any] = {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accept_length": self.accept_length,
            "acceptance": self.acceptance,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "tokens_per_second": self.tokens_per_second,
            "finish_reason": self.finish_reason,
        }
        if self.error is not None:
            out["error"] = self.error
        if self.logprobs:
            out["logprobs"] = [
                {"token": p.token, "logprob": p.logprob, "top": [{"token": t, "logprob": v} for t, v in p.top]}
                for p in self.logprobs
            ]
        return out


@dataclass(frozen=True, slots=True)
class Step:
    """What a stream yields: the tokens that one prompt gained in one forward.

    Attributes:
        index: which prompt.
        tokens: new ids.
        text: new text, "" while a character or a stop string is undecided.
        round: the verify behind it, None for the prefill's token.
    """

    index: int
    tokens: tuple[int, ...]
    text: str
    round: Round | None
