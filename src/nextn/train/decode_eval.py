"""Measure acceptance in the real engine: decode from the prompts of the text, and count its rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from nextn import api
from nextn.options import DraftVocabulary
from nextn.train.acceptance import BUCKETS, Acceptance
from nextn.train.packing import Document, PackedBatch

AT_ONCE = 8
"""Prompts decoded together."""
PROMPT_SHARE = 4
"""Of a text without a prompt of its own, the first 1/4 is the prompt."""


def prompts(data: Iterable[PackedBatch], count: int) -> list[Document]:
    """Up to `count` prompts, one a document: what stands before its first answer, or the beginning of a plain text."""
    found: list[Document] = []
    for batch in data:
        for number, domain in enumerate(batch.domains):
            at = batch.documents == number
            ids, mask = batch.ids[at].tolist(), batch.loss_mask[at].tolist()
            length = mask.index(True) or max(1, len(ids) // PROMPT_SHARE)
            found.append(Document(ids[:length], mask[:length], domain))
            if len(found) == count:
                return found
    return found


def decode_acceptance(
    model: api.Model,
    given: list[Document],
    *,
    draft_tokens: int,
    draft_vocab: DraftVocabulary = None,
    max_tokens: int,
    temperature: float,
    seed: int = 0,
    edges: tuple[int, ...] = BUCKETS,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Decode and count.

    Args:
        given: prompts, with the domain that their rounds count for.
        draft_vocab: as `api.draft_vocabulary` takes it.
        temperature: 0 is greedy; nothing else of the checkpoint's own sampling is used.
        progress: called with (prompts done, prompts in all).
    Returns:
        the fields of `Acceptance.as_json`, with ``prompts``, ``tokens`` and ``temperature``.
    """
    counts = Acceptance(draft_tokens, edges)
    tokens = 0
    for start in range(0, len(given), AT_ONCE):
        part = given[start : start + AT_ONCE]
        run = api.Run(
            model,
            [list(d.ids) for d in part],
            draft_tokens=draft_tokens,
            draft_vocab=draft_vocab,
            options_each=[
                {
                    "temperature": temperature,
                    "top_p": 1.0,
                    "top_k": 0,
                    "min_p": 0.0,
                    "repetition_penalty": 1.0,
                    "max_tokens": max_tokens,
                    "seed": (seed + start + i) % 2**63,
                }
                for i in range(len(part))
            ],
        )
        for _ in run:
            pass
        for document, result in zip(part, run.results, strict=True):
            tokens += len(result.tokens)
            known = len(document.ids) + 1
            for r in result.draft_rounds:
                kept = torch.tensor([[r.accepted > i for i in range(draft_tokens)]])
                counts.add(kept, torch.tensor([known]), [document.domain])
                known += r.accepted + 1
        if progress is not None:
            progress(start + len(part), len(given))
    return {"temperature": temperature, "prompts": len(given), "tokens": tokens, **counts.as_json()}
