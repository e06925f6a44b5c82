"""Choose tokens from logits: processing, sampling, and the acceptance of draft tokens that leaves the target's law.

Everything is a batch of torch operations with no host synchronisation, so a captured graph can hold it. Processing
has one order, in verify as in plain decoding: repetition, presence and frequency penalties, bias, minimum length,
temperature, top-k, top-p, min-p. A row of verify counts the draft tokens before it as output.

Shapes: B sequences, T rows a sequence, K draft tokens, V ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nextn.engine.logits import SamplingState, adjust, process
from nextn.engine.params import SamplingParams
from nextn.engine.random import ACCEPT, DRAFT, DRAW, LANES, uniforms

__all__ = [
    "ACCEPT",
    "DRAFT",
    "DRAW",
    "LANES",
    "SamplingParams",
    "SamplingState",
    "accept",
    "accept_greedy",
    "adjust",
    "broken_logits",
    "process",
    "sample",
    "token_logprobs",
    "uniforms",
]


def sample(probs: Tensor, draws: Tensor) -> Tensor:
    """Draw ids by the inverse of the cumulative distribution; never one of probability zero.

    Args:
        probs: [..., V], non-negative; each row's sum may be any positive number.
        draws: [...] in [0, 1), float64.

    Returns:
        [...] int64.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    goal = draws.unsqueeze(-1) * cumulative[..., -1:]
    ids = torch.searchsorted(cumulative, goal, right=True).clamp(max=probs.shape[-1] - 1)
    # A parallel cumulative sum may step up by one rounding at an id of probability zero.
    possible = probs.gather(-1, ids) > 0
    return torch.where(possible, ids, probs.argmax(-1, keepdim=True)).squeeze(-1)


def broken_logits(logits: Tensor) -> Tensor:
    """Whether a sequence's logits hold a NaN, or have no finite largest one: no token can be chosen from them.

    Args:
        logits: [B, T, V].
    Returns:
        [B] bool.
    """
    return ~logits.amax(-1).isfinite().all(-1)


class Settled(NamedTuple):
    """What follows from a round's acceptance.

    Attributes:
        kept: [batch], new tokens: the accepted drafts and one more.
        lengths: [batch], with them.
        bonus: [batch], the last of them.
        outcome: [batch, 2 * K + 3] int64, what the host reads, side by side: tokens, accepted, drafts, broken.
    """

    kept: Tensor
    lengths: Tensor
    bonus: Tensor
    outcome: Tensor


def settle(lengths: Tensor, tokens: Tensor, accepted: Tensor, drafts: Tensor, broken: Tensor) -> Settled:
    """Move sequences on by what a round decided.

    Args:
        lengths: [batch] int64, before it.
        tokens: [batch, K + 1].
        accepted: [batch].
        drafts: [batch, K].
        broken: [batch] bool.
    """
    kept = accepted + 1
    outcome = torch.cat((tokens, accepted[:, None], drafts, broken[:, None].to(torch.int64)), 1)
    return Settled(kept, lengths + kept, tokens.gather(1, accepted[:, None])[:, 0], outcome)


def accept_greedy(choices: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Accept draft tokens while they are the target's own choices.

    Args:
        choices: [B, K + 1], the target's token after each verified row.
        drafts: [B, K].

    Returns:
        tokens [B, K + 1]: accepted drafts, then the new bonus token, then ids without meaning; and accepted [B].
    """
    return choices, (choices[:, :-1] == drafts).long().cumprod(-1).sum(-1)


def accept(target_probs: Tensor, drafts: Tensor, draft_probs: Tensor | None, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Accept draft tokens by rejection sampling, so that the tokens follow the target's distribution.

    Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318): draft d of row i is kept with
    probability min(1, p_i(d) / q_i(d)), and a token in place of the first refused one is drawn from max(p_i - q_i, 0).

    Draft tokens chosen without chance (q is one at d) are kept with probability p_i(d) by drawing the target's token
    at every row and comparing: the same law, and the tokens are those that plain decoding draws with the same
    numbers.

    Args:
        target_probs: [B, K + 1, V] from `process`.
        drafts: [B, K].
        draft_probs: [B, K, V], what the drafts were drawn from, or None for drafts chosen without chance.
        draws: [B, K + 1, LANES] from `uniforms`, for the position that the token of each row takes.

    Returns:
        tokens [B, K + 1]: accepted drafts, then the new bonus token, then ids without meaning; and accepted [B].
    """
    if draft_probs is None or not drafts.shape[1]:
        return accept_greedy(sample(target_probs, draws[..., DRAW]), drafts)
    steps = drafts.shape[1]
    p = target_probs[:, :-1].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    q = draft_probs.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    kept = draws[:, :-1, ACCEPT] * q.double() < p.double()
    accepted = kept.long().cumprod(-1).sum(-1)

    at = accepted.view(-1, 1, 1)
    width = target_probs.shape[-1]
    law = target_probs.gather(1, at.expand(-1, 1, width)).squeeze(1)
    refused = draft_probs.gather(1, at.clamp(max=steps - 1).expand(-1, 1, width)).squeeze(1)
    residual = (law - refused).clamp(min=0)
    use = (accepted < steps) & (residual.sum(-1) > 0)
    draw = draws[..., DRAW].gather(1, accepted.unsqueeze(-1)).squeeze(-1)
    bonus = sample(torch.where(use.unsqueeze(-1), residual, law), draw).unsqueeze(-1)
    row = torch.arange(steps + 1, device=drafts.device)
    padded = torch.cat([drafts, bonus], dim=1)
    return torch.where(row < accepted.unsqueeze(-1), padded, bonus), accepted


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities to report, of the model's own distribution before any processing, as OpenAI and vLLM do.

    Args:
        logits: [..., V].
        tokens: [...], the ids chosen.
        top: how many of the most probable ids to report.

    Returns:
        chosen [...], the log probability of each token; ids [..., top], the most probable first; their log
        probabilities [..., top].
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    logs = torch.log_softmax(logits, dim=-1)
    best = logs.topk(min(top, logs.shape[-1]), dim=-1)
    return logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), best.indices, best.values
