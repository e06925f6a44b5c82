"""Decode speed with the heads of `train_smollm2` in the real engine: one request at a time, greedy."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from nextn import api
from nextn.engine.engine import Engine
from nextn.engine.request import Request, Running

PROMPTS = 24
REPEATS = 3
NEW_TOKENS = 256


def prompts(path: Path, count: int) -> list[list[int]]:
    """What stands before the answers of ``count`` lines, evenly spaced, of a file of ids and masks.

    Evenly, because a file of answers begins with those that ended first, which are the short ones.
    """
    lines = path.read_text().splitlines()
    rows = [json.loads(lines[n * len(lines) // min(count, len(lines))]) for n in range(min(count, len(lines)))]
    return [row["input_ids"][: row["loss_mask"].index(1)] for row in rows]


def decode_speed(
    target: Path, head: Path | None, given: Sequence[list[int]], *, draft_tokens: int, device: str | None = None
) -> dict[str, Any]:
    """Tokens a second of decoding after each prompt's first token, median over REPEATS passes over all prompts.

    Args:
        head: with its draft vocabulary, if it has one; None decodes without.
    """
    model = api.load(target, mtp=head is not None, head=head, device=device)
    listed = head / "draft_vocab.json" if head is not None else None
    vocab = json.loads(listed.read_text())["ids"] if listed is not None and listed.is_file() else None
    engine = Engine(model.target, draft_tokens=draft_tokens if head is not None else 0, draft_vocab=vocab)
    params = api.sampling_params(model, max_tokens=NEW_TOKENS, temperature=0.0)
    requests = [Request(ids, params, frozenset(model.defaults.eos_ids)) for ids in given]
    scheduler = engine.scheduler([max(len(ids) for ids in given) + NEW_TOKENS + 64])
    rates: list[float] = []
    done: list[Running] = []
    for turn in range(REPEATS + 1):
        tokens, seconds, done = 0, 0.0, []
        for request in requests[: 2 if turn == 0 else None]:  # the first pass captures and compiles
            scheduler.add(request)
            began: float | None = None
            sequence: Running | None = None
            while not scheduler.idle:
                for s, update in scheduler.step():
                    sequence = s
                    if began is None:
                        began = time.perf_counter()
                    else:
                        tokens += len(update.tokens)
            assert began is not None
            assert sequence is not None
            seconds += time.perf_counter() - began
            done.append(sequence)
        if turn:
            rates.append(tokens / seconds)
    rounds = [r for s in done for r in s.rounds if r.drafts]
    accepted = sum(r.accepted for r in rounds)
    return {
        "draft_tokens": draft_tokens if head is not None else 0,
        "draft_vocab": len(vocab) if vocab is not None else None,
        "prompts": len(given),
        "tokens": sum(len(s.tokens) for s in done),
        "tokens_per_second": median(rates),
        "accept_length": 1 + accepted / len(rounds) if rounds else None,
        "graphs": engine.graphs,
    }
