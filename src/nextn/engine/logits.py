"""Turn logits into the probabilities that a batch of requests samples from.

`SamplingState` holds the requests' parameters as tensors and what penalties need to know of the tokens so far;
`process` is the whole way from logits to probabilities. Rows of verify count the draft tokens before them, with the
same arithmetic in the same order as plain decoding, so the same logits give the same probabilities to the last bit.

Shapes: B sequences, T rows a sequence, K draft tokens, V ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from nextn.engine.params import SamplingParams
from nextn.errors import NextnError

FEW = 1024
"""Largest logits that usually hold top-p's share of the probability."""


@dataclass(frozen=True)
class Plan:
    """Which operations a batch needs. Fixed while its requests are; a key for captured graphs.

    Attributes:
        all_greedy, any_greedy: requests decoding greedily.
        top_k, top_p, min_p: filters in use by a sampled request.
        largest: how many of the largest logits the filters look at; V sorts them all, 0 sorts nothing.
        penalties, repetition, bias, min_tokens: adjustments in use.
        reported: most probable ids to report beside each token, at least as many as any request asks for; None where
            none asks for log probabilities.
    """

    all_greedy: bool
    any_greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    largest: int
    penalties: bool
    repetition: bool
    bias: bool
    min_tokens: bool
    reported: int | None

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` can change which token is the most probable."""
        return self.penalties or self.bias or self.min_tokens

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> Plan:
        sampled = [p for p in params if not p.greedy]
        limits = [p.top_k for p in sampled if p.top_k > 0]
        top_p = any(p.top_p < 1 for p in sampled)
        unlimited = any(p.top_p < 1 and p.top_k <= 0 for p in sampled)
        asked = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            all_greedy=not sampled,
            any_greedy=len(sampled) < len(params),
            top_k=bool(limits),
            top_p=top_p,
            min_p=any(p.min_p > 0 for p in sampled),
            largest=vocab_size if unlimited else min(max(limits, default=0), vocab_size),
            penalties=any(p.penalised for p in params),
            repetition=any(p.repetition_penalty != 1 for p in params),
            bias=any(p.logit_bias for p in params),
            min_tokens=any(p.min_tokens > 0 for p in params),
            reported=min(power_of_two(max(asked)), vocab_size) if asked else None,
        )


@dataclass
class SamplingState:
    """The sampling parameters of a batch, on its device, and what its penalties count.

    Attributes:
        params: the requests.
        plan: the operations in use.
        seed: [B] int64, drawn here for requests that name none.
        generated: [B] int64, tokens committed to the output so far.
        temperature, top_p, min_p: [B, 1, 1] float64; greedy requests carry values that change nothing.
        top_k: [B, 1, 1] int64, 0 is off.
        greedy: [B, 1, 1] bool.
        repetition, presence, frequency: [B, 1, 1] float64.
        counts: [B, V] int32, how often an id is in the output; [B, 0] without penalties.
        in_prompt: [B, V] bool; [B, 0] without a repetition penalty.
        bias_ids, bias: [B, N] int64 and float64, padded with zeros.
        stop_ids, min_tokens: [B, S] and [B, 1] int64; ids are padded with -1.
    """

    params: tuple[SamplingParams, ...]
    vocab_size: int
    plan: Plan
    seed: Tensor
    generated: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    greedy: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    counts: Tensor
    in_prompt: Tensor
    bias_ids: Tensor
    bias: Tensor
    stop_ids: Tensor
    min_tokens: Tensor

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        stop_ids: Sequence[Collection[int]] | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingState:
        """Tensors for requests that have generated nothing yet.

        Args:
            params, prompts: a request each; the prompt's ids matter to the repetition penalty.
            stop_ids: all ids that end each request (`SamplingParams.stop_ids`), held back until min_tokens.

        Raises:
            NextnError: a logit bias for an id outside the vocabulary.
        """
        plan = Plan.of(params, vocab_size)
        rows = len(params)
        biased = [id for p in params for id in p.logit_bias if id >= vocab_size]
        if biased:
            raise NextnError(
                f"logit_bias names id {biased[0]}, and the vocabulary has {vocab_size}.",
                f"Name ids from 0 to {vocab_size - 1}.",
            )

        def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).view(rows, 1, 1)

        in_prompt = torch.zeros(rows, vocab_size if plan.repetition else 0, dtype=torch.bool)
        if plan.repetition:
            for row, ids in enumerate(prompts):
                in_prompt[row, torch.tensor(ids, dtype=torch.long)] = True
        stops = [sorted(i for i in ids if 0 <= i < vocab_size) for ids in stop_ids or [()] * rows]
        return cls(
            params=tuple(params),
            vocab_size=vocab_size,
            plan=plan,
            seed=torch.tensor(
                [secrets.randbits(63) if p.seed is None else p.seed for p in params], dtype=torch.long, device=device
            ),
            generated=torch.zeros(rows, dtype=torch.long, device=device),
            temperature=column([1.0 if p.greedy else p.temperature for p in params]),
            top_p=column([1.0 if p.greedy else p.top_p for p in params]),
            min_p=column([0.0 if p.greedy else p.min_p for p in params]),
            top_k=column([0 if p.greedy else min(max(p.top_k, 0), vocab_size) for p in params], torch.long),
            greedy=column([p.greedy for p in params], torch.bool),
            repetition=column([p.repetition_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            counts=torch.zeros(rows, vocab_size if plan.penalties else 0, dtype=torch.int32, device=device),
            in_prompt=in_prompt.to(device),
            bias_ids=_padded([list(p.logit_bias) for p in params], 0, torch.long).to(device),
            bias=_padded([list(p.logit_bias.values()) for p in params], 0, torch.float64).to(device),
            stop_ids=_padded(stops, -1, torch.long).to(device),
            min_tokens=column([p.min_tokens for p in params], torch.long).squeeze(-1),
        )

    @classmethod
    def join(cls, states: Sequence[SamplingState]) -> SamplingState:
        """The states of several batches as one, in order.

        Counts that a batch did not keep are zeros: none of its requests looks at them.
        """
        params = tuple(p for s in states for p in s.params)
        vocab_size = states[0].vocab_size
        tensors: dict[str, Tensor] = {}
        for f in fields(cls):
            values = [v for s in states if isinstance(v := getattr(s, f.name), Tensor)]
            if not values:
                continue
            if values[0].dim() > 1:
                width, filler = max(v.shape[-1] for v in values), -1 if f.name == "stop_ids" else 0
                values = [pad(v, (0, width - v.shape[-1]), value=filler) for v in values]
            tensors[f.name] = torch.cat(values)
        return cls(params, vocab_size, Plan.of(params, vocab_size), **tensors)

    def commit(self, tokens: Tensor, lengths: Tensor) -> None:
        """Count tokens as output, in place: the first ``lengths[b]`` of ``tokens[b]``.

        Args:
            tokens: [B, T] ids; those past the length need only be valid.
            lengths: [B] int64.
        """
        self.generated += lengths
        if self.plan.penalties:
            taken = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(-1)
            self.counts.scatter_add_(1, tokens, taken.int())

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of biases and of stop ids that the plan needs, rounded up so that few widths occur."""
        plan = self.plan
        return (
            power_of_two(max(len(p.logit_bias) for p in self.params)) if plan.bias else 0,
            power_of_two(self.stop_ids.shape[1]) if plan.min_tokens else 0,
        )

    def fitted(self, widths: tuple[int, int]) -> SamplingState:
        """With so many columns of biases and of stop ids, and counts only where the plan looks at them."""
        biases, stops = widths
        more = biases - self.bias.shape[1]
        return replace(
            self,
            counts=self.counts[:, : self.vocab_size if self.plan.penalties else 0],
            in_prompt=self.in_prompt[:, : self.vocab_size if self.plan.repetition else 0],
            bias_ids=pad(self.bias_ids, (0, more)),
            bias=pad(self.bias, (0, more)),
            stop_ids=pad(self.stop_ids, (0, stops - self.stop_ids.shape[1]), value=-1),
        )

    def select(self, rows: Sequence[int]) -> SamplingState:
        """The state of some of the requests, in the order given."""
        index = torch.tensor(rows, dtype=torch.long, device=self.seed.device)
        params = tuple(self.params[row] for row in rows)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: value[index] for name, value in values.items() if isinstance(value, Tensor)}
        return SamplingState(params, self.vocab_size, Plan.of(params, self.vocab_size), **tensors)


def power_of_two(n: int) -> int:
    """The smallest that is not below n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def _padded(rows: Sequence[Sequence[float]], filler: int, dtype: torch.dtype) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], dtype=dtype).view(len(rows), width)


def adjust(logits: Tensor, state: SamplingState, drafts: Tensor | None = None, first_row: int = 0) -> Tensor:
    """Apply penalties, bias and minimum length: everything that can change the most probable token.

    Args:
        logits: [B, T, V]; half precision is raised to float32.
        drafts: [B, K], counted as output in the rows after them: row r counts the first ``first_row + r``.
        first_row: row of verify that row 0 stands for; a draft step after j draft tokens passes j.

    Returns:
        [B, T, V], the logits themselves where no request asks for an adjustment.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    plan = state.plan
    if not plan.adjusts:
        return logits
    row = first_row + torch.arange(logits.shape[1], device=logits.device)
    out = logits
    if plan.penalties:
        in_prompt = state.in_prompt if plan.repetition else torch.zeros_like(state.counts, dtype=torch.bool)
        out = _penalise(logits, state.counts.unsqueeze(1), in_prompt.unsqueeze(1), state)
        if drafts is not None and drafts.shape[1] and first_row + logits.shape[1] > 1:
            before = torch.arange(drafts.shape[1], device=logits.device) < row.unsqueeze(-1)  # [T, K]
            same = drafts.unsqueeze(1) == drafts.unsqueeze(2)  # [B, K, K]
            drafted = (same.unsqueeze(1) & before[:, None]).sum(-1, dtype=torch.int32)  # [B, T, K]
            counts = state.counts.gather(1, drafts).unsqueeze(1) + drafted
            ids = drafts.unsqueeze(1).expand(-1, logits.shape[1], -1)
            known = in_prompt.gather(1, drafts).unsqueeze(1)
            out = out.scatter(-1, ids, _penalise(logits.gather(-1, ids), counts, known, state))
    if plan.bias:
        shape = (-1, logits.shape[1], -1)
        out = out.scatter_add(
            -1, state.bias_ids.unsqueeze(1).expand(shape), state.bias.to(out.dtype).unsqueeze(1).expand(shape)
        )
    if plan.min_tokens:
        early = (state.generated.unsqueeze(-1) + row < state.min_tokens).unsqueeze(-1)  # [B, T, 1]
        forbidden = early & (state.stop_ids >= 0).unsqueeze(1)
        ids = state.stop_ids.clamp(min=0).unsqueeze(1).expand(forbidden.shape)
        out = out.scatter_add(-1, ids, torch.zeros_like(ids, dtype=out.dtype).masked_fill(forbidden, -torch.inf))
    return out


def _penalise(logits: Tensor, counts: Tensor, in_prompt: Tensor, state: SamplingState) -> Tensor:
    """Penalties as in vLLM: repetition by what is in prompt or output, presence and frequency by the output's counts.

    Repetition: Keskar et al. 2019 (arXiv 1909.05858), negative logits multiplied; the others: OpenAI's API reference.
    """
    repetition, presence, frequency = (p.to(logits.dtype) for p in (state.repetition, state.presence, state.frequency))
    used = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    out = torch.where(used | in_prompt, repeated, logits)
    return out - frequency * counts - presence * used


def process(logits: Tensor, state: SamplingState, drafts: Tensor | None = None, first_row: int = 0) -> Tensor:
    """The probabilities that each row is sampled from; greedy requests get one at the most probable id.

    Ties: greedy takes the lowest id; top-k keeps all ids as probable as the k-th, as transformers and vLLM do; top-p
    keeps the lowest ids of those as probable as its last.

    Args:
        logits: [B, T, V].
        drafts, first_row: as in `adjust`.

    Returns:
        [B, T, V] in the dtype of the logits, float32 at least.
    """
    logits = adjust(logits, state, drafts, first_row)
    plan = state.plan
    best = logits.argmax(-1, keepdim=True)
    if plan.all_greedy:
        return torch.zeros_like(logits).scatter_(-1, best, 1)
    # The largest logit is taken off first, so that no temperature overflows.
    scaled = (logits - logits.gather(-1, best)) / state.temperature.to(logits.dtype)
    weights = scaled.exp()
    if plan.largest:
        weights = _top_k_top_p(scaled, weights, state)
    if plan.min_p:
        # The largest weight is 1.
        weights = weights.masked_fill(weights < state.min_p.to(weights.dtype), 0)
    probs = weights / weights.sum(-1, keepdim=True)
    if plan.any_greedy:
        probs = torch.where(state.greedy, torch.zeros_like(probs).scatter_(-1, best, 1), probs)
    return probs


def _top_k_top_p(scaled: Tensor, weights: Tensor, state: SamplingState) -> Tensor:
    """Set to zero the weights outside top-k, then outside top-p of what is left.

    The cut is found by value among the largest logits; ids tied with the cut are then counted off in id order.

    Args:
        scaled: [B, T, V], logits over temperature, at most 0; weights: their exponentials.
    """
    plan = state.plan
    values = _largest(scaled, weights, state)
    masses = values.exp()
    if plan.top_k:
        floor = values.gather(-1, (state.top_k - 1).clamp(min=0).expand(*values.shape[:-1], 1))
        floor = torch.where(state.top_k > 0, floor, -torch.inf)
        weights = weights.masked_fill(scaled < floor, 0)
        masses = masses.masked_fill(values < floor, 0)
    if not plan.top_p:
        return weights
    goal = state.top_p * weights.sum(-1, keepdim=True, dtype=torch.float64)
    reached = masses.cumsum(-1, dtype=torch.float64)
    # Of broken logits (`broken_logits`) nothing is below the goal.
    last = ((reached - masses < goal).sum(-1, keepdim=True) - 1).clamp(min=0)
    cut = values.gather(-1, last)
    larger = (values > cut).sum(-1, keepdim=True)
    above = torch.where(larger > 0, reached.gather(-1, (larger - 1).clamp(min=0)), 0)
    allowed = ((goal - above) / cut.exp()).ceil().clamp(min=1)
    tied = scaled == cut
    kept = (scaled > cut) | (tied & (tied.cumsum(-1, dtype=torch.int32) <= allowed))
    return weights.masked_fill(~kept & (state.top_p < 1), 0)


def _largest(scaled: Tensor, weights: Tensor, state: SamplingState) -> Tensor:
    """Enough of each row's largest values, in order, for top-k and top-p to find their cut: [B, T, n].

    As many as top-k allows where every request with top-p has top-k too, else all of them. Sorting a vocabulary of
    150,000 takes longer than all else here, so on a CPU, where looking costs nothing, a few are tried first.
    """
    if state.plan.largest < scaled.shape[-1]:
        return scaled.topk(state.plan.largest, dim=-1).values
    if scaled.device.type == "cpu" and scaled.shape[-1] > FEW and int(state.top_k.max()) <= FEW:
        values = scaled.topk(FEW, dim=-1).values
        share = values.exp().sum(-1, keepdim=True, dtype=torch.float64) / weights.sum(-1, keepdim=True)
        if bool(((share > state.top_p + 1e-6) | (state.top_p >= 1)).all()):
            return values
    return scaled.sort(dim=-1, descending=True).values
