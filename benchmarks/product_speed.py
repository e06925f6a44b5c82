"""The speed of `nextn.generate` itself, scheduler, stops and text included: one prompt, greedy, random weights."""

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
from nextn.generation import Generation
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


def timed(model: Model, prompt: Sequence[int], k: int) -> tuple[Generation, float]:
    """What a call of `generate` gave, and the milliseconds between two of its forwards.

    Forwards are counted from the first one's tokens to the last one's: the prompt and the capturing of the graph come
    before. They are in the `seconds` of the whole call.
    """
    stamps: list[float] = []
    out = generate(
        model,
        prompt,
        temperature=0.0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        draft_tokens=k,
        on_step=lambda _: stamps.append(time.perf_counter()),
    )
    first = stamps[1]  # stamps[0] is the prompt's token
    return out, (stamps[-1] - first) / (len(stamps) - 2) * 1e3


def product_speed(target: Decoder, context: int, k: int) -> dict[str, Any]:
    """Keys of a row of decode.py: times a step and a round, tokens a second of a whole call, accept length.

    Args:
        target: a decoder with its head.
        context: random ids of the prompt.
        k: draft tokens of the round.
    """
    folder = embedded_model()
    model = Model(folder, target, None, Folded(folder), GenerationDefaults({}, (), None, None), LoadReport())
    prompt = torch.randint(0, target.config.vocab, (context,)).tolist()
    found: dict[str, Any] = {"generate_tokens": NEW_TOKENS}
    for what, drafts in (("step", 0), ("round", k)):
        timed(model, prompt, drafts)  # compiles
        out, ms = timed(model, prompt, drafts)
        found[f"generate_{what}_ms"] = round(ms, 4)
        found[f"generate_{what}_tokens_per_s"] = round(out.tokens_per_second, 1)
        if drafts:
            found["generate_accept_length"] = round(out.accept_length or 1.0, 3)
    return found
