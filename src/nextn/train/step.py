"""One optimiser step: target pass, unroll, loss, gradient, update, over the packed batches of all processes.

The loss is the mean over all rows of the step, wherever they are computed: one process with four packed batches and
four processes with one each take the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from nextn.errors import NextnError
from nextn.models.decoder import Decoder
from nextn.train.config import TrainConfig
from nextn.train.contexts import UnrollContext
from nextn.train.layout import Layout
from nextn.train.losses import LossSpec, chain_loss, teachable
from nextn.train.packing import PackedBatch
from nextn.train.processes import Processes
from nextn.train.shard import gathered
from nextn.train.start import Start
from nextn.train.unroll import TargetStates, Unrolled, target_states, valid_rows

Item = tuple[PackedBatch, TargetStates | None]
"""A packed batch, with the target's hidden states where they were cached."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave.

    Attributes:
        loss: weighted over the draft steps.
        by_step: mean loss of each draft step, None where no row reached it.
        rows: predictions that the first draft step was taught, over all processes.
        tokens: of documents, over all processes.
        gradient: its norm before clipping.
    """

    loss: float
    by_step: list[float | None]
    rows: int
    tokens: int
    gradient: float


class HeadStep:
    """Takes optimiser steps on a head.

    Args:
        begun: target and head, sharded already where they are to be.
        config, processes: of the run.
        spec: the loss.
    """

    def __init__(self, begun: Start, config: TrainConfig, processes: Processes, spec: LossSpec) -> None:
        self.model, self.unroll = begun.model, begun.unroll
        self.config, self.processes, self.spec = config, processes, spec
        self.optimisers = _optimisers(list(self.unroll.parameters()), config)
        self.done = 0
        self._proven = False
        self._cast = head_is_cast(config, processes.device)

    def __call__(self, items: Sequence[Item]) -> StepResult:
        """One step over this process's share of the packed batches.

        Raises:
            NextnError: the loss does not depend on the head, or is not finite.
        """
        device, steps = self.processes.device, self.config.unroll
        placed = [(batch.to(device), states) for batch, states in items]
        layouts = [Layout(there.documents, here.documents) for (there, _), (here, _) in zip(placed, items, strict=True)]
        valid = [
            teachable(valid_rows(batch, layout, steps), batch.ids, self.spec)
            for (batch, _), layout in zip(placed, layouts, strict=True)
        ]
        own = [torch.stack([v.sum() for v in rows]) for rows in valid]
        sizes = torch.stack([(batch.documents >= 0).sum() for batch, _ in placed]).sum()
        totals = self.processes.total(torch.cat((torch.stack(own).sum(0), sizes[None])).double())
        counts = totals[:-1]
        sums = torch.zeros_like(counts)
        self._set_rate()
        with gathered(self.model):
            weight = self.model.output_weight
            reduced = self.spec.draft_weight(weight)
            for (batch, cached), layout, rows in zip(placed, layouts, valid, strict=True):
                states = self.states(batch, cached, layout)
                outputs = self.outputs(batch, states, layout, steps)
                loss, part = chain_loss(
                    outputs, states.teacher, batch.ids, rows, weight, counts, self.spec, draft_weight=reduced
                )
                if not loss.requires_grad:
                    raise NextnError(_INDEPENDENT, _REPORT)
                (loss * self.processes.world).backward()  # FSDP averages over processes; the loss is a sum already.
                sums += part
        sums = self.processes.total(sums)
        norm = clip_grad_norm_(self.unroll.parameters(), self.config.clip)
        gradient = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        self._check(float(counts[0]), gradient)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.done += 1
        means = (sums / counts.clamp_min(1)).tolist()
        by_step = [mean if count else None for mean, count in zip(means, counts.tolist(), strict=True)]
        total = sum(w * mean for w, mean in zip(self.spec.weights, means, strict=True))
        return StepResult(total, by_step, int(counts[0]), int(totals[-1]), gradient)

    def states(self, batch: PackedBatch, cached: TargetStates | None, layout: Layout) -> TargetStates:
        """The target's hidden states: from the cache, or by a pass."""
        if cached is not None:
            given = cached.given.to(self.processes.device)
            same = cached.teacher is cached.given
            return TargetStates(given, given if same else cached.teacher.to(self.processes.device))
        assert isinstance(self.model, Decoder)
        return target_states(self.model, batch, layout)

    def outputs(self, batch: PackedBatch, states: TargetStates, layout: Layout, steps: int) -> list[Tensor]:
        """The head's outputs in its own arithmetic."""
        high = torch.float64 if states.given.dtype == torch.float64 else torch.float32
        dtype = torch.bfloat16 if self._cast else high
        with ExitStack() as stack:
            if self._cast:
                stack.enter_context(torch.autocast(self.processes.device.type, dtype))
            context = UnrollContext(layout, batch.positions)
            outputs: list[Tensor] = self.unroll(self.model, context, batch.ids, states.given.to(dtype), steps)
        return outputs

    @torch.no_grad()
    def judged(self, model: Decoder, batch: PackedBatch, steps: int) -> Unrolled:
        """The unroll for an evaluation, its outputs in the output head's dtype."""
        layout = Layout(batch.documents)
        states = self.states(batch, None, layout)
        outputs = [out.to(states.teacher.dtype) for out in self.outputs(batch, states, layout, steps)]
        return Unrolled(outputs, valid_rows(batch, layout, steps), states.teacher)

    def rate(self) -> float:
        """Learning rate of the next step."""
        config = self.config
        warm = max(round(config.warmup * config.steps), 1)
        if self.done < warm:
            return config.lr * (self.done + 1) / warm
        left = 1 - (self.done - warm) / max(config.steps - warm, 1)
        shape = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}
        return config.lr * shape[config.schedule]

    def _set_rate(self) -> None:
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.rate()

    def _check(self, rows: float, gradient: float) -> None:
        if not math.isfinite(gradient):
            raise NextnError(
                f"The gradient is not finite at step {self.done + 1}.",
                "Lower lr, or use target_dtype=float32 and autocast=off.",
            )
        if rows and not self._proven:
            if gradient == 0:
                raise NextnError(_INDEPENDENT, _REPORT)
            self._proven = True


def head_is_cast(config: TrainConfig, device: torch.device) -> bool:
    """Whether the head computes in bfloat16."""
    return config.autocast == "bfloat16" or (config.autocast == "auto" and device.type == "cuda")


def _optimisers(parameters: Sequence[nn.Parameter], config: TrainConfig) -> tuple[Optimizer, ...]:
    """AdamW; or Muon (Jordan et al. 2024) for matrices, its updates as large as AdamW's (Liu et al., arXiv 2502.16982,
    section 2.2), so that one learning rate serves both."""
    planes = [p for p in parameters if p.dim() == 2 and config.optimizer == "muon"]
    left = [p for p in parameters if not (p.dim() == 2 and config.optimizer == "muon")]
    groups = [
        {"params": [p for p in left if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in left if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=(0.9, 0.95))
    if not planes:
        return (adamw,)
    decay = config.weight_decay
    return torch.optim.Muon(planes, lr=config.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"), adamw


_INDEPENDENT = "The loss does not depend on the head, so that training would change nothing."
_REPORT = "Check `loss` and `draft_vocab`: the draft vocabulary may hold none of the data's tokens."
