"""Held-out figures of a decoder and its head, teacher-forced on text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from nextn.errors import NextnError
from nextn.models.decoder import Decoder
from recipes.tiny.unroll import TrunkContext, unroll


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Teacher-forced figures.

    Attributes:
        loss: nats a token of the main model.
        accuracy: share of next tokens that are the main model's first choice.
        agreement: by draft step, share of rows where the head's first choice is the target's own.
        prefix: the same counted only where all earlier steps agreed too.
        accept_length: 1 + sum of `prefix`: what a round would gain if the text were the target's own choice.
    """

    loss: float
    accuracy: float
    agreement: list[float]
    prefix: list[float]
    accept_length: float

    def line(self) -> str:
        by_step = " ".join(f"{p:.3f}" for p in self.prefix)
        return (
            f"held-out loss {self.loss:.4f}, top-1 {self.accuracy:.3f}, prefix {by_step}, AL {self.accept_length:.3f}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "loss_nats_per_token": round(self.loss, 4),
            "perplexity": round(math.exp(self.loss), 3),
            "accuracy": round(self.accuracy, 4),
            "agreement_by_step": [round(a, 4) for a in self.agreement],
            "prefix_by_step": [round(p, 4) for p in self.prefix],
            "accept_length": round(self.accept_length, 4),
        }


@torch.no_grad()
def evaluate(
    model: Decoder,
    stream: np.ndarray,
    *,
    window: int,
    batch: int,
    steps: int,
    device: torch.device,
    limit: int = 1 << 30,
) -> HeldOut:
    """Run over a stream of ids in windows side by side, each without a past.

    Args:
        stream: [tokens] ids.
        window: tokens of a window.
        steps: draft steps K.
        limit: windows at most.
    """
    count = min(len(stream) // window, limit)
    if count < 1:
        raise NextnError(f"The held-out text has {len(stream)} tokens.", f"Evaluation needs {window} at least.")
    rows = torch.from_numpy(stream[: count * window].astype(np.int64)).view(count, window)
    loss, right, tokens, chains = 0.0, 0, 0, 0
    agreed, joint = [0] * steps, [0] * steps
    for ids in rows.split(batch):
        ids = ids.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            positions = torch.arange(window, device=device).expand(len(ids), -1)
            post, pre = model(ids, TrunkContext(positions))
            logits = model.logits(post)
            drafts = unroll(model, ids, model.head_hidden(post, pre), steps)
        best = logits.argmax(-1)
        loss += float(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"))
        right += int((best[:, :-1] == ids[:, 1:]).sum())
        tokens += ids[:, 1:].numel()
        alive: torch.Tensor | None = None
        for k, draft in enumerate(drafts, 1):
            same = draft.argmax(-1) == best[:, k : k + draft.shape[1]]
            alive = same if alive is None else alive & same
            agreed[k - 1] += int(same.sum())
            joint[k - 1] += int(alive.sum())
        chains += drafts[0].shape[0] * drafts[0].shape[1]
    prefix = [j / chains for j in joint]
    return HeldOut(loss / tokens, right / tokens, [a / chains for a in agreed], prefix, 1 + sum(prefix))
