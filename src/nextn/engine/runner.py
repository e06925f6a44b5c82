"""What executes the rows of a forward: the modules themselves, or the fused kernels over the same parameters.

Rounds and prefill are written against `Runner` and do not know which one they have.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from nextn.engine.contexts import DraftContext, Rows, TargetContext
from nextn.engine.draft_vocab import DraftVocab
from nextn.engine.sampling import (
    SamplingState,
    Settled,
    accept,
    accept_greedy,
    broken_logits,
    process,
    sample,
    settle,
    uniforms,
)
from nextn.models.decoder import Decoder, Drafter


class Runner(Protocol):
    """Forwards of a target and its drafter over the caches that `Rows` names."""

    target: Decoder
    draft: Drafter

    def target_rows(self, ids: Tensor, where: Rows) -> tuple[Tensor, Tensor]:
        """Target hidden states of ids [batch, rows] after and before the final norm, [batch, rows, hidden]."""
        ...

    def head_rows(self, ids: Tensor, hidden: Tensor, where: Rows, step: int = 0) -> tuple[Tensor, Tensor]:
        """Head rows (`Drafter.head_forward`): output and recycled hidden state, [batch, rows, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's output head over [batch, rows, hidden]."""
        ...

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """The drafter's output head over [batch, rows, hidden]; minus infinity for ids that are not drafted."""
        ...

    def best(self, logits: Tensor) -> Tensor:
        """Lowest id of the largest logit, [batch, rows]."""
        ...

    def accept_best(self, logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`best`, and the acceptance of drafts [batch, K] against it (`engine.sampling.accept_greedy`).

        Returns:
            (tokens [batch, K + 1], accepted [batch], whether the logits hold NaN [batch]).
        """
        ...

    def process(self, logits: Tensor, state: SamplingState, drafts: Tensor, first_row: int = 0) -> Tensor:
        """Probabilities to sample from (`engine.logits.process`)."""
        ...

    def uniforms(self, seed: Tensor, position: Tensor) -> Tensor:
        """The random numbers of positions (`engine.random.uniforms`)."""
        ...

    def sample(self, probs: Tensor, draws: Tensor) -> Tensor:
        """Ids drawn from probabilities (`engine.sampling.sample`)."""
        ...

    def accept(self, probs: Tensor, drafts: Tensor, draft_probs: Tensor | None, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Rejection sampling (`engine.sampling.accept`): (tokens, accepted)."""
        ...

    def settle(self, lengths: Tensor, tokens: Tensor, accepted: Tensor, drafts: Tensor, broken: Tensor) -> Settled:
        """What follows from a round's acceptance (`engine.sampling.settle`)."""
        ...


class PlainRunner:
    """Runs the modules; any device, dtype and number of rows.

    Args:
        target, draft: the models.
        vocab: the ids to draft from, None for all.
    """

    def __init__(self, target: Decoder, draft: Drafter, vocab: DraftVocab | None = None) -> None:
        self.target, self.draft, self.vocab = target, draft, vocab

    def target_rows(self, ids: Tensor, where: Rows) -> tuple[Tensor, Tensor]:
        return self.target(ids, TargetContext(where))

    def head_rows(self, ids: Tensor, hidden: Tensor, where: Rows, step: int = 0) -> tuple[Tensor, Tensor]:
        return self.draft.head_forward(ids, hidden, DraftContext(where), step)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        return self.draft.logits(hidden) if self.vocab is None else self.vocab.logits(hidden)

    def best(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def accept_best(self, logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        choices = logits.argmax(-1)
        return *accept_greedy(choices, drafts), broken_logits(logits)

    def process(self, logits: Tensor, state: SamplingState, drafts: Tensor, first_row: int = 0) -> Tensor:
        return process(logits, state, drafts, first_row)

    def uniforms(self, seed: Tensor, position: Tensor) -> Tensor:
        return uniforms(seed, position)

    def sample(self, probs: Tensor, draws: Tensor) -> Tensor:
        return sample(probs, draws)

    def accept(self, probs: Tensor, drafts: Tensor, draft_probs: Tensor | None, draws: Tensor) -> tuple[Tensor, Tensor]:
        return accept(probs, drafts, draft_probs, draws)

    def settle(self, lengths: Tensor, tokens: Tensor, accepted: Tensor, drafts: Tensor, broken: Tensor) -> Settled:
        return settle(lengths, tokens, accepted, drafts, broken)
