"""Judge a head on text, teacher-forced: which of its drafts the target would have accepted, at every position.

A draft counts when it equals the target's own most probable token given the text so far, and only if all drafts
before it counted too. On text that the target wrote itself, greedily, this is what decoding does, and walking through
it round by round gives the engine's own rounds (`simulated`); on other text it is a forecast.

At a temperature, the draft of step k is accepted with probability sum(min(p, q)) given the text so far (Leviathan et
al. 2023, arXiv 2211.17192); a prefix, with the product of its steps'. In a text that was sampled from p, a token x was
an accepted draft with probability min(1, q(x) / p(x)): by that, the rounds that gave the text are walked on average.
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
        sampled_simulated: at the positions where decoding at it would verify, as often as is to be expected.
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
    sampled_simulated: Acceptance | None = field(init=False)

    def __post_init__(self) -> None:
        self.greedy, self.simulated = (Acceptance(self.draft_tokens, self.edges) for _ in range(2))
        self.sampled = self.sampled_simulated = None
        if self.temperature is not None:
            self.sampled, self.sampled_simulated = (Acceptance(self.draft_tokens, self.edges) for _ in range(2))

    def merge(self, other: Evaluation) -> None:
        """Add what another process counted, of other text."""
        self.tokens += other.tokens
        self.own += other.own
        self.greedy.merge(other.greedy)
        self.simulated.merge(other.simulated)
        for mine, theirs in (
            (self.sampled, other.sampled),
            (self.sampled_simulated, other.sampled_simulated),
        ):
            if mine is not None and theirs is not None:
                mine.merge(theirs)

    @property
    def accept_length(self) -> float | None:
        """Greedy, teacher-forced."""
        return self.greedy.total.accept_length

    def as_json(self) -> dict[str, Any]:
        """The greedy measure's fields at the top; the others under their names."""
        heat = {"temperature": self.temperature}
        return {
            "draft_tokens": self.draft_tokens,
            **self.greedy.as_json(),
            "tokens": self.tokens,
            "own_text": self.own / self.tokens if self.tokens else None,
            "simulated": self.simulated.as_json(),
            "sampled": heat | self.sampled.as_json() if self.sampled else None,
            "sampled_simulated": heat | self.sampled_simulated.as_json() if self.sampled_simulated else None,
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
        if out.sampled is not None and out.sampled_simulated is not None and out.temperature is not None:
            laws = [(unrolled.outputs[k][0, at], unrolled.teacher[0, at + k + 1], ids[at + k + 2]) for k in steps]
            found = [self._expected(*law, out.temperature) for law in laws]
            accepted, told_so = (torch.stack(parts, 1).double() for parts in zip(*found, strict=True))
            out.sampled.add(accepted.cumprod(1), lengths, domains)
            reached = F.pad(told_so.cumprod(1), (1, 1))
            reached[:, 0] = 1
            often = visits(at.tolist(), (reached[:, :-1] - reached[:, 1:]).tolist(), batch)
            out.sampled_simulated.add(reached[:, :-2] * accepted, lengths, domains, often)

    def _choices(self, hidden: Tensor, ids: Tensor | None) -> Tensor:
        """Most probable id, among `ids` if given, of hidden states [rows, hidden] -> [rows]."""
        found = []
        for block in hidden.split(self.rows):
            logits = self.model.logits(block)
            found.append(logits.argmax(-1) if ids is None else ids[logits[:, ids].argmax(-1)])
        return torch.cat(found)

    def _expected(self, head: Tensor, teacher: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Probabilities [rows] that a draft is accepted, and that the text's token was one, from hidden states."""
        accepted, drafted = [], []
        for ours, theirs, told in zip(*(x.split(self.rows) for x in (head, teacher, tokens)), strict=True):
            p, logits = _law(self.model.logits(theirs), temperature), self.model.logits(ours)
            if self.draft_ids is None:
                q = _law(logits, temperature)
            else:
                q = torch.zeros_like(p).index_copy(1, self.draft_ids, _law(logits[:, self.draft_ids], temperature))
            accepted.append(torch.minimum(p, q).sum(-1))
            one_p, one_q = (law.gather(1, told[:, None])[:, 0] for law in (p, q))
            drafted.append(torch.where(one_q < one_p, one_q / one_p, 1.0))
        return torch.cat(accepted), torch.cat(drafted)


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
    first = _first_rows(batch)
    out = []
    due = -1
    for index, row in enumerate(chains):
        if first[row] or row == due:
            out.append(index)
            due = row + accepted[index] + 1
    return out


def visits(chains: list[int], accepted: list[list[float]], batch: PackedBatch) -> list[float]:
    """How often decoding is expected to start from each chain: once from the first of an answer, then by chance.

    Args:
        chains: rows judged, ascending.
        accepted: of each, the probabilities that exactly 0, 1, .. K drafts are kept.
    """
    first = _first_rows(batch)
    at = {row: index for index, row in enumerate(chains)}
    out = [float(first[row]) for row in chains]
    for index, row in enumerate(chains):
        for kept, share in enumerate(accepted[index]):
            reached = at.get(row + kept + 1)
            if reached is not None and not first[chains[reached]]:
                out[reached] += out[index] * share
    return out


def _first_rows(batch: PackedBatch) -> list[bool]:
    """Rows that a prompt ends with: their own token is no answer, or none of their document is before it."""
    numbers, told = batch.documents[0].tolist(), batch.loss_mask[0].tolist()
    return [not told[row] or row == 0 or numbers[row - 1] != number for row, number in enumerate(numbers)]


def _law(logits: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide / temperature).softmax(-1)
