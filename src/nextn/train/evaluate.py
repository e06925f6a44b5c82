"""Judge a head on text, teacher-forced: which of its drafts the target would have accepted, at every position.

A draft counts when it equals the target's own most probable token given the text so far, and only if all drafts
before it counted too. On text that the target wrote itself, greedily, this is what decoding does, and walking through
it round by round gives the engine's own rounds (`simulated`); on other text it is a forecast.

At a temperature, the draft of step k is accepted with probability sum(min(p, q)) given the text so far (Leviathan et
al. 2023, arXiv 2211.17192); a prefix, with the product of its steps'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nextn.errors import NextnError
from nextn.models.decoder import Decoder
from nextn.train.acceptance import BUCKETS, Acceptance
from nextn.train.packing import PackedBatch
from nextn.train.processes import Processes
from nextn.train.unroll import Unrolled, require_layers, unrolled_logits

LOGITS_BYTES = 256 << 20
"""Of the largest block of logits that is held at once."""

Unroll = Callable[[Decoder, PackedBatch, int], Unrolled]


@dataclass
class Evaluation:
    """What judging a text gave.

    Attributes:
        greedy: at every position of the text.
        simulated: at the positions where greedy decoding of this text would verify.
        sampled: at every position, at `temperature`; None where none was asked for.
        tokens: judged, over which `own` counts those that are the target's own choice: 1.0 for its own greedy text.
    """

    draft_tokens: int
    edges: tuple[int, ...] = BUCKETS
    temperature: float | None = None
    tokens: int = 0
    own: int = 0
    greedy: Acceptance = field(init=False)
    simulated: Acceptance = field(init=False)
    sampled: Acceptance | None = field(init=False)

    def __post_init__(self) -> None:
        self.greedy, self.simulated = (Acceptance(self.draft_tokens, self.edges) for _ in range(2))
        self.sampled = Acceptance(self.draft_tokens, self.edges) if self.temperature is not None else None

    def merge(self, other: Evaluation) -> None:
        """Add what another process counted, of other text."""
        self.tokens += other.tokens
        self.own += other.own
        self.greedy.merge(other.greedy)
        self.simulated.merge(other.simulated)
        if self.sampled is not None and other.sampled is not None:
            self.sampled.merge(other.sampled)

    @property
    def accept_length(self) -> float | None:
        """Greedy, teacher-forced."""
        return self.greedy.total.accept_length

    def as_json(self) -> dict[str, Any]:
        """The greedy measure's fields at the top; the others under their names."""
        return {
            "draft_tokens": self.draft_tokens,
            **self.greedy.as_json(),
            "tokens": self.tokens,
            "own_text": self.own / self.tokens if self.tokens else None,
            "simulated": self.simulated.as_json(),
            "sampled": {"temperature": self.temperature, **self.sampled.as_json()} if self.sampled else None,
        }


@torch.no_grad()
def evaluate(
    model: Decoder,
    data: Iterable[PackedBatch],
    *,
    draft_tokens: int,
    temperature: float | None = None,
    edges: tuple[int, ...] = BUCKETS,
    draft_ids: Tensor | None = None,
    unroll: Unroll = unrolled_logits,
    together: Processes | None = None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Judge the head of a model on packed text.

    Args:
        draft_tokens: K.
        temperature: also measure expected acceptance at this temperature, over 0.
        edges: upper ends of the context-length buckets.
        draft_ids: the only ids that the head drafts; None is all.
        unroll: gives the head's outputs.
        together: processes that judge as many batches each (`share`); all return the sum of their counts.
        progress: called with the tokens judged so far, after each batch.
    Raises:
        NextnError: K beyond what the head has layers for, or no place in the text where K drafts could be judged.
    """
    require_layers(model, draft_tokens)
    out = Evaluation(draft_tokens, edges, temperature)
    judge = _Judge(model, draft_ids)
    seen = 0
    for batch in data:
        placed = batch.to(model.embed.weight.device)
        judge.count(out, placed, unroll(model, placed, draft_tokens))
        seen += batch.ids.shape[1]
        if progress is not None:
            progress(seen)
    if together is not None:
        first, *others = together.each(out)
        for other in others:
            first.merge(other)
        out = first
    if not out.greedy.total.rounds:
        raise NextnError(
            f"No text of the data has {draft_tokens + 1} tokens to predict in a row.",
            "Give longer texts, or fewer draft tokens.",
        )
    return out


def share(data: Sequence[PackedBatch], processes: Processes) -> list[PackedBatch]:
    """This process's batches of a text. Each process gets as many, since they run a sharded model's forwards together:
    where they do not go round, a batch comes again with nothing to judge."""
    own = list(data[processes.rank :: processes.world])
    if len(own) < -(-len(data) // processes.world):
        own.append(replace(data[0], loss_mask=torch.zeros_like(data[0].loss_mask)))
    return own


class _Judge:
    """Compares the head's laws with the target's, in blocks of rows whose logits stay small."""

    def __init__(self, model: Decoder, draft_ids: Tensor | None) -> None:
        self.model, self.draft_ids = model, draft_ids
        self.rows = max(1, LOGITS_BYTES // (4 * model.config.vocab))

    def count(self, out: Evaluation, batch: PackedBatch, unrolled: Unrolled) -> None:
        """Add a batch's positions to an evaluation."""
        ids, told = batch.ids[0], batch.loss_mask[0]
        choices = self._choices(unrolled.teacher[0], None)
        answers = torch.nonzero(told & (batch.positions[0] > 0))[:, 0]
        out.tokens += len(answers)
        out.own += int((choices[answers - 1] == ids[answers]).sum())
        at = torch.nonzero(judged_chains(batch, unrolled)[0])[:, 0]
        if not len(at):
            return
        steps = range(out.draft_tokens)
        drafts = [self._choices(unrolled.outputs[k][0, at], self.draft_ids) for k in steps]
        kept = torch.stack([drafts[k] == choices[at + k + 1] for k in steps], 1).long().cumprod(1)
        lengths = batch.positions[0, at] + 2
        numbers = batch.documents[0, at].tolist()
        domains = [batch.domains[n] for n in numbers] if batch.domains else [""] * len(numbers)
        out.greedy.add(kept, lengths, domains)
        walked = walk(at.tolist(), kept.sum(1).tolist(), batch)
        out.simulated.add(kept[walked], lengths[walked], [domains[i] for i in walked])
        if out.sampled is not None and out.temperature is not None:
            laws = [(unrolled.outputs[k][0, at], unrolled.teacher[0, at + k + 1]) for k in steps]
            accepted = [self._expected(head, teacher, out.temperature) for head, teacher in laws]
            out.sampled.add(torch.stack(accepted, 1).cumprod(1), lengths, domains)

    def _choices(self, hidden: Tensor, ids: Tensor | None) -> Tensor:
        """Most probable id, among `ids` if given, of hidden states [rows, hidden] -> [rows]."""
        found = []
        for block in hidden.split(self.rows):
            logits = self.model.logits(block)
            found.append(logits.argmax(-1) if ids is None else ids[logits[:, ids].argmax(-1)])
        return torch.cat(found)

    def _expected(self, head: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Probability [rows] that a draft is accepted, from the head's and the target's hidden states."""
        found = []
        for ours, theirs in zip(head.split(self.rows), teacher.split(self.rows), strict=True):
            q, p = self.model.logits(ours), _law(self.model.logits(theirs), temperature)
            if self.draft_ids is not None:
                q, p = q[:, self.draft_ids], p[:, self.draft_ids]
            found.append(torch.minimum(p, _law(q, temperature)).sum(-1))
        return torch.cat(found)


def judged_chains(batch: PackedBatch, unrolled: Unrolled) -> Tensor:
    """[1, T] bool: chains whose bonus token and all K tokens to predict belong to an answer of one document."""
    bonus = F.pad(batch.loss_mask[:, 1:], (0, 1))
    return torch.stack([bonus, *unrolled.valid]).all(0)


def walk(chains: list[int], accepted: list[int], batch: PackedBatch) -> list[int]:
    """Which chains decoding would start from: the first of each answer, then each the accepted drafts + 1 further.

    Args:
        chains: rows judged, ascending.
        accepted: how many drafts of each are kept.
    Returns:
        indices into `chains`.
    """
    numbers = batch.documents[0].tolist()
    told = batch.loss_mask[0].tolist()
    out = []
    due = -1
    for index, row in enumerate(chains):
        # The token of the row itself is no answer, or there is none before it: the prompt ends here.
        first = not told[row] or row == 0 or numbers[row - 1] != numbers[row]
        if first or row == due:
            out.append(index)
            due = row + accepted[index] + 1
    return out


def _law(logits: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide / temperature).softmax(-1)
