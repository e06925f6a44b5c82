"""The real engine with its draft logits recorded, and proposals chosen so that drafts are accepted or not at will."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.engine.engine import Engine
from nextn.models.context import Context
from nextn.models.decoder import Decoder, Drafter
from tests.engine.models import decode


@dataclass(frozen=True)
class Chain:
    """One round's drafting.

    Attributes:
        tokens: the committed text, the bonus token last, then the drafts that were fed back.
        start: position t of the head's row that gave the first draft.
        logits: K of [vocab].
    """

    tokens: list[int]
    start: int
    logits: list[Tensor]


class Recorder(Drafter):
    """A model's own head that writes down its logits, and proposes the text's tokens except where it is to lie."""

    def __init__(self, model: Decoder, text: list[int], lies: frozenset[int], k: int) -> None:
        super().__init__(model.config)
        self.real, self.text, self.lies, self.k = model, text, lies, k
        self.rows: list[tuple[int, Tensor, int]] = []
        self.last: tuple[Tensor, Tensor] = torch.empty(0), torch.empty(0)

    def head_forward(self, ids: Tensor, hidden: Tensor, context: Context, step: int = 0) -> tuple[Tensor, Tensor]:
        out, recycled = self.real.head_forward(ids, hidden, context, step)
        self.last = context.positions[0], out[0]
        return out, recycled

    def logits(self, hidden: Tensor) -> Tensor:
        positions, outs = self.last
        position = int(positions[(outs == hidden[0, 0]).all(-1)][0])
        at = position + 2
        token = self.text[at] if at < len(self.text) else 0
        token = (token + (at in self.lies)) % self.config.vocab
        self.rows.append((position, self.real.logits(hidden)[0, 0], token))
        proposal = torch.zeros_like(hidden, dtype=hidden.dtype).new_zeros(1, 1, self.config.vocab)
        proposal[0, 0, token] = 1
        return proposal

    def chains(self) -> list[Chain]:
        found = []
        for first in range(0, len(self.rows), self.k):
            group = self.rows[first : first + self.k]
            start = group[0][0]
            assert [p for p, _, _ in group] == list(range(start, start + self.k))
            if start + 2 <= len(self.text):
                tokens = self.text[: start + 2] + [token for _, _, token in group[:-1]]
                found.append(Chain(tokens, start, [logits for _, logits, _ in group]))
        return found


def engine_chains(
    model: Decoder, prompt: list[int], *, k: int, chunk: int, lies: frozenset[int], count: int = 14
) -> list[Chain]:
    """Decode with the engine and return what its head said in every round."""
    [plain] = decode(Engine(model, draft_tokens=0), [prompt], max_tokens=count)
    recorder = Recorder(model, prompt + plain.tokens, lies, k)
    engine = Engine(model, draft=recorder, draft_tokens=k, chunk=chunk, page_size=4)
    [fast] = decode(engine, [prompt], max_tokens=count)
    assert fast.tokens == plain.tokens
    return recorder.chains()
