"""The peak memory of a round, with the head inside its target and as a draft model of its own.

Each peak is taken in a round's compiling, capturing and replaying, with nothing on the GPU but the weights that this
way of decoding holds and one cache. What else was allocated when the measurement began is reported beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode_bench import Bench
from nextn.engine.draft_vocab import DraftVocab
from nextn.models.decoder import Decoder, Drafter
from nextn.models.load import build, parameter_bytes


@dataclass(frozen=True)
class Peak:
    """A round's time, and its memory.

    Attributes:
        ms: milliseconds a round.
        peak_gb: most that was allocated.
        other_gb: allocated before the round was built, beside weights and cache.
    """

    ms: float
    peak_gb: float
    other_gb: float


def released() -> int:
    """Give back what nothing refers to, cuBLAS' workspaces included; the bytes that stay allocated."""
    gc.collect()
    # Every stream that a graph was warmed up on has left a workspace of its own.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def peak(bench: Bench, k: int, held: Iterable[Tensor], **options: Any) -> Peak:
    """Time a round from a clean start.

    Args:
        bench: model, cache and batch size.
        k: draft tokens.
        held: the weights that this way of decoding needs.
        options: for `Bench.time`.
    """
    alive = released()
    other = alive - parameter_bytes(held) - bench.cache.nbytes
    torch.cuda.reset_peak_memory_stats()
    ms = bench.time(k, **options)
    return Peak(ms, torch.cuda.max_memory_allocated() / 1e9, other / 1e9)


def native(bench: Bench, k: int) -> Peak:
    """A round with the head inside the target."""
    return peak(bench, k, bench.model.parameters())


def reduced(bench: Bench, k: int, ids: int) -> Peak:
    """The same, drafting from the first `ids` ids."""
    vocab = DraftVocab.gather(bench.model, range(ids))
    return peak(bench, k, [*bench.model.parameters(), vocab.weight], vocab=vocab)


def separate(bench: Bench, k: int) -> Peak:
    """A round with the head in a draft model of its own, beside a target that has none."""
    with separated(bench.model) as draft:
        return peak(bench, k, [*bench.model.parameters(), *draft.parameters()], draft=draft)


@contextmanager
def separated(model: Decoder) -> Iterator[Drafter]:
    """What `load(separate_draft=True)` makes of a model with a head: the target loses it to a draft model that has an
    embedding and, where the target has one, an output head of its own. Afterwards the model is as it was."""
    weight = model.embed.weight
    draft = build(model.config, dtype=weight.dtype, device=weight.device, kind=Drafter)
    for mine, theirs in ((draft.embed, model.embed), (draft.head, model.head)):
        if mine is not None and theirs is not None:
            mine.weight.data.copy_(theirs.weight)
    draft.mtp, model.mtp = model.mtp, None
    try:
        yield draft
    finally:
        model.mtp, draft.mtp = draft.mtp, None
