"""Random small decoders for engine tests, and a drafter that is right as often as a test wants."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextn.checkpoint.source import open_checkpoint
from nextn.engine.engine import Engine
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request, Running
from nextn.models.context import Context, SequenceContext
from nextn.models.decoder import Decoder, Drafter
from nextn.models.load import load_decoder
from tests.oracle.checkpoints import make_checkpoint

CPU = torch.device("cpu")
KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "llama", "qwen2", "qwen3")


@functools.cache
def decoder(kind: str, dtype: torch.dtype = torch.float64, vocab: int = 97, seed: int = 0) -> Decoder:
    """A loaded random decoder with its head."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_checkpoint(Path(folder), kind, seed=seed, vocab_size=vocab)
        return load_decoder(open_checkpoint(made), dtype=dtype, device=CPU)[0]


def decode(engine: Engine, prompts: list[list[int]], **params: Any) -> list[Running]:
    """Decode to the end with one set of options for all prompts."""
    options = {"temperature": 0.0, "max_tokens": 12, **params}
    requests = [Request(p, SamplingParams(**options)) for p in prompts]
    sequences: dict[int, Running] = {}
    for news in engine.rounds(requests):
        sequences |= {s.index: s for s, _ in news}
    return [sequences[i] for i in range(len(prompts))]


class Prompter(Drafter):
    """A drafter that knows what the target will say and lies at chosen positions.

    It stands in for a head of any quality: drafts for position p are the target's own token there, or another one
    where ``lie(p)`` holds. Works for a single sequence.
    """

    def __init__(self, target: Decoder, text: list[int], lies: frozenset[int]) -> None:
        super().__init__(target.config)
        self.text, self.lies = text, lies

    def head_forward(self, ids: Tensor, hidden: Tensor, context: Context, step: int = 0) -> tuple[Tensor, Tensor]:
        at = context.positions + 2
        return at[..., None].to(hidden.dtype), hidden

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.zeros(*hidden.shape[:-1], self.config.vocab, dtype=hidden.dtype)
        for index in torch.cartesian_prod(*(torch.arange(n) for n in hidden.shape[:-1])):
            position = int(hidden[tuple(index)])
            token = self.text[position] if position < len(self.text) else 0
            out[(*index, (token + (position in self.lies)) % self.config.vocab)] = 1
        return out


def plain_drafts(model: Decoder, ids: list[int], k: int) -> list[int]:
    """d1..dK after the tokens `ids` (the bonus last), by whole-sequence forwards: no cache, no engine code."""
    tokens = torch.tensor([ids])
    past = SequenceContext(torch.arange(len(ids) - 1)[None])
    post, pre = model(tokens[:, :-1], past)
    hidden = model.head_hidden(post, pre)
    following = tokens[:, 1:]
    drafts: list[int] = []
    for _ in range(k):
        rows = SequenceContext(torch.arange(hidden.shape[1])[None])
        out, recycled = model.head_forward(following, hidden, rows)
        drafts.append(int(model.logits(out[:, -1]).argmax()))
        hidden = torch.cat((hidden, recycled[:, -1:]), 1)
        following = torch.cat((following, torch.tensor([[drafts[-1]]])), 1)
    return drafts
