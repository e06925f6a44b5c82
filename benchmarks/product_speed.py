"""The speed of `nextn.generate` itself, scheduler, stops and text included: greedy, random weights."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nextn.api import Model, generate
from nextn.assets import embedded_model
from nextn.engine.defaults import GenerationDefaults
from nextn.engine.text import Tokenizer
from nextn.generation import Generation, Step
from nextn.models.decoder import Decoder
from nextn.models.load import LoadReport

NEW_TOKENS = 256


class Folded(Tokenizer):
    """A tokenizer whose ids repeat every `size`, so that a larger vocabulary's ids are all some text."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.size: int = json.loads((folder / "config.json").read_text())["vocab_size"]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return super().decode([id % self.size for id in ids], skip_special=skip_special)


def timed(model: Model, prompts: Sequence[Sequence[int]], k: int) -> tuple[list[Generation], float]:
    """What a call of `generate` gave, and the milliseconds between two of its forwards.

    Forwards are counted by the first prompt's steps, from its first one's tokens to the last one's: the prompts and the
    capturing of the graph come before. They are in the `seconds` of the whole call.
    """
    stamps: list[float] = []

    def seen(step: Step) -> None:
        if step.index == 0:
            stamps.append(time.perf_counter())

    out = generate(
        model,
        prompts,
        temperature=0.0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        draft_tokens=k,
        on_step=seen,
    )
    first = stamps[1]  # stamps[0] is the prompt's token
    return out, (stamps[-1] - first) / (len(stamps) - 2) * 1e3


def product_speed(target: Decoder, size: int, context: int, k: int) -> dict[str, Any]:
    """Keys of a row of decode.py: times a step and a round, tokens a second of a whole call, accept length.

    Args:
        target: a decoder with its head.
        size: prompts.
        context: random ids of each.
        k: draft tokens of the round.
    """
    folder = embedded_model()
    model = Model(folder, target, None, Folded(folder), GenerationDefaults({}, (), None, None), LoadReport())
    prompts = torch.randint(0, target.config.vocab, (size, context)).tolist()
    found: dict[str, Any] = {"generate_tokens": NEW_TOKENS}
    for what, drafts in (("step", 0), ("round", k)):
        timed(model, prompts, drafts)  # compiles
        out, ms = timed(model, prompts, drafts)
        found[f"generate_{what}_ms"] = round(ms, 4)
        found[f"generate_{what}_tokens_per_s"] = round(sum(g.tokens_per_second for g in out), 1)
        if drafts:
            rounds, accepted = sum(g.rounds for g in out), sum(g.accepted for g in out)
            found["generate_accept_length"] = round(1 + accepted / rounds, 3)
    return found
