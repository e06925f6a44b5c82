"""Serving-exact unroll: what the head will hand the engine at each draft step, for all positions of a text at once.

Chain t, step k (from 1): position t + k - 1; embedding of token t + k; hidden state h_t of the target at k = 1, what
step k - 1 of the same chain recycled after that; predicts token t + k + 1, for which the target's own distribution
comes from h_{t+k}. For the same tokens these outputs equal the engine's, which a test proves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nextn.errors import NextnError
from nextn.models.decoder import Decoder, Drafter
from nextn.models.mtp import MTPHead
from nextn.train.contexts import PackedContext, UnrollContext
from nextn.train.layout import Layout, Packed


@dataclass(frozen=True, slots=True)
class TargetStates:
    """What one pass of the target leaves for training.

    Attributes:
        given: [1, T, hidden], what the head is given.
        teacher: [1, T, hidden] after the final norm; the output head over row t gives the law of token t + 1.
    """

    given: Tensor
    teacher: Tensor


@dataclass(frozen=True, slots=True)
class Unrolled:
    """The draft steps of all chains.

    Attributes:
        outputs: K of [1, T, hidden]; entry k - 1 at t, through the output head, predicts token t + k + 1.
        valid: K of [1, T] bool: chain t reaches step k inside its document and may be taught or judged there.
        teacher: [1, T, hidden]; row t + k gives the target's law for entry k - 1 at t.
    """

    outputs: list[Tensor]
    valid: list[Tensor]
    teacher: Tensor


class HeadUnroll(nn.Module):
    """K calls of a head as one forward, so that a sharded head is gathered once for all of them.

    Args:
        head: the target's own module; it is held, not copied.
        one_each: every step is given the target's hidden state, not what the step before recycled.
    """

    def __init__(self, head: MTPHead, *, one_each: bool) -> None:
        super().__init__()
        self.mtp = head
        self.one_each = one_each

    def forward(
        self, drafter: Drafter, context: UnrollContext, ids: Tensor, hidden: Tensor, steps: int
    ) -> list[Tensor]:
        """Outputs of steps 1..K.

        Args:
            drafter: whose embedding is used; positions come from `context`.
            ids: [1, T]; rows whose chain leaves the text take id 0.
            hidden: [1, T, hidden] in the dtype to compute in.
        Returns:
            K of [1, T, hidden].
        """
        outputs = []
        state = hidden
        for k in range(1, steps + 1):
            context.step = k - 1
            following = F.pad(ids[:, k:], (0, min(k, ids.shape[1])))
            embedding = drafter.embed(following).to(hidden.dtype)
            rope = drafter.rotary(context.positions, hidden.dtype)
            out, recycled = self.mtp(embedding, hidden if self.one_each else state, rope, context, k - 1)
            state = recycled
            outputs.append(out)
        return outputs


def head_unroll(drafter: Drafter) -> HeadUnroll:
    """The unroll of a model's own head."""
    assert drafter.mtp is not None
    return HeadUnroll(drafter.mtp, one_each=drafter.config.family.physical_layers == "one_each")


def require_layers(drafter: Drafter, steps: int) -> None:
    """Raises NextnError where a family has one physical layer a step and fewer than `steps` of them."""
    layers = drafter.config.head_layers
    if drafter.config.family.physical_layers != "reuse" and steps > layers:
        raise NextnError(
            f"The head has {layers} layers, one a draft step, and unroll is {steps}.", f"Use unroll={layers} or less."
        )


@torch.no_grad()
def target_states(model: Decoder, batch: Packed, layout: Layout) -> TargetStates:
    """One pass of the frozen target over a packed batch."""
    post, pre = model(batch.ids, PackedContext(layout, batch.positions))
    return TargetStates(model.head_hidden(post, pre), post)


def valid_rows(batch: Packed, layout: Layout, steps: int) -> list[Tensor]:
    """Which chains count at each step: token t + k + 1 is of the same document and may be predicted.

    Returns:
        K of [1, T] bool.
    """
    wanted = []
    for k in range(1, steps + 1):
        predictable = F.pad(batch.loss_mask[:, k + 1 :], (0, min(k + 1, batch.ids.shape[1])))
        wanted.append(layout.same_document(k + 1) & predictable)
    return wanted


def unrolled_logits(model: Decoder, batch: Packed, steps: int) -> Unrolled:
    """The unroll of a model over a packed batch on the model's device, in the model's dtype.

    `model.logits` of an output gives the logits; they are not made here, since [T, vocab] may not fit.
    """
    layout = Layout(batch.documents)
    states = target_states(model, batch, layout)
    context = UnrollContext(layout, batch.positions)
    outputs = head_unroll(model)(model, context, batch.ids, states.given, steps)
    return Unrolled(outputs, valid_rows(batch, layout, steps), states.teacher)
