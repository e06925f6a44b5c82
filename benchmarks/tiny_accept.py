"""Measure the embedded model on a CPU: held-out loss, accept length and tokens per second with and without its head.

Prompts are pieces of held-out standard-library files, found again by the recipe's split in the library of the
interpreter that runs this. For every prompt each draft length takes its turn before the next prompt begins, so that
other load on the machine hits all alike; one prompt a batch, greedy.

    python -m benchmarks.tiny_accept --out benchmarks/results/tiny-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.machine import processor
from nextn.assets import embedded_model
from nextn.checkpoint.source import open_checkpoint
from nextn.engine.engine import Engine, Request
from nextn.engine.params import SamplingParams
from nextn.models.decoder import Decoder
from nextn.models.load import load_decoder
from recipes.tiny.corpus import Document, collect, figures, standard_library
from recipes.tiny.evaluate import evaluate
from recipes.tiny.pack import stream

PROMPT_TOKENS = 128


def prompts(documents: list[Document], tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """`count` pieces of PROMPT_TOKENS ids spread evenly over the held-out text, each within one document."""
    pieces: list[list[int]] = []
    for document in documents:
        ids = tokenizer.encode(document.text).ids
        pieces += [ids[at : at + PROMPT_TOKENS] for at in range(0, len(ids) - PROMPT_TOKENS + 1, PROMPT_TOKENS)]
    return [pieces[i * len(pieces) // count] for i in range(min(count, len(pieces)))]


def decode(engine: Engine, prompt: list[int], tokens: int) -> tuple[list[int], list[int]]:
    """Generate greedily past any end token; returns (tokens, accepted drafts of each round)."""
    request = Request(prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    for updates in engine.rounds([request]):
        running = updates[0][0]
    return running.tokens, [r.accepted for r in running.rounds]


def measure(model: Decoder, asked: list[list[int]], tokens: int, longest: int) -> list[dict[str, Any]]:
    """One entry a draft length from 0 (no head) to `longest`.

    Speeds are medians over prompts; `ratio` is the median of each prompt's own ratio to decoding without the head.
    """
    engines = [Engine(model, draft_tokens=k) for k in range(longest + 1)]
    for engine in engines:
        decode(engine, asked[0], 16)
    accepted: list[list[int]] = [[] for _ in engines]
    seconds: list[list[float]] = [[] for _ in engines]
    same = [0] * len(engines)
    for number, prompt in enumerate(asked):
        turns = range(len(engines)) if number % 2 == 0 else reversed(range(len(engines)))
        produced = {}
        for k in turns:
            engines[k].stats.decode_seconds = 0.0
            produced[k], rounds = decode(engines[k], prompt, tokens)
            seconds[k].append(engines[k].stats.decode_seconds)
            accepted[k] += rounds
        for k, out in produced.items():
            same[k] += out == produced[0]
    rows = []
    for k, rounds in enumerate(accepted):
        row: dict[str, Any] = {
            "draft_tokens": k,
            "tokens_per_second": round((tokens - 1) / median(seconds[k]), 1),
            "ratio": round(median(plain / own for plain, own in zip(seconds[0], seconds[k], strict=True)), 3),
        }
        if k:
            row |= {
                "rounds": len(rounds),
                "accept_length": round(1 + sum(rounds) / len(rounds), 3),
                "acceptance": [round(sum(a > i for a in rounds) / len(rounds), 4) for i in range(k)],
                "prompts_with_identical_tokens": same[k],
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--longest", type=int, default=5)
    parser.add_argument("--windows", type=int, default=64, help="held-out windows of 1,024 tokens for the loss")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = embedded_model()
    cpu = torch.device("cpu")
    model, _ = load_decoder(open_checkpoint(str(folder)), dtype=torch.float32, device=cpu)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = collect(standard_library())
    held_out = [d for d in documents if d.held_out]
    started = time.monotonic()
    loss = evaluate(
        model,
        stream(tokenizer, [d.text for d in held_out]),
        window=1024,
        batch=4,
        steps=args.longest,
        device=cpu,
        limit=args.windows,
    )
    asked = prompts(held_out, tokenizer, args.prompts)
    result = {
        "what": "nextn-tiny, float32, batch 1, greedy, held-out prompts from the standard library",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": processor(),
        "threads": args.threads,
        "load_average_at_start": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "corpus": figures(documents),
        "teacher_forced": {"window": 1024, "windows": args.windows, **loss.as_json()},
        "prompts": len(asked),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": args.tokens,
        "decoding": measure(model, asked, args.tokens, args.longest),
        "seconds": round(time.monotonic() - started, 1),
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
