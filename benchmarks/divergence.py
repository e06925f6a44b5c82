"""How often greedy tokens in bf16 differ with the head on and off, and whether each difference is a near-tie.

    python benchmarks/divergence.py --out benchmarks/results/divergence-h200.json

A verify of several rows rounds differently from a step of one, so where two logits are closer than the rounding, the
choice may flip and the texts part. For every first difference the logits of both tokens are computed again in
float32. `gap` is how far the lower of the two lies under the best; `rounding` is the largest difference between a bf16
and a float32 logit at that position, over the whole vocabulary and through the whole model. A gap of at most twice the
rounding is a near-tie. `--exact` decoding is run too: it must never differ.

Prompts are decoded `--batch` at a time, for each of the sizes given; for small sizes fewer prompts than `--prompts`, at
most 32 groups of them. Every way of decoding runs in a process of its own, all at once: most of the time goes into
compiling kernels. For the same reason prompts take the plain recurrence also where flash-linear-attention is there:
its kernels would be tuned first, and a prompt is computed in the same way with the head on and off.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.command_line import need_gpu, positive
from benchmarks.decode_setup import random_model
from benchmarks.geometries import GEOMETRIES
from benchmarks.gpu_timing import provenance
from nextn import api
from nextn.engine import contexts
from nextn.engine.admission import spare_positions
from nextn.engine.engine import MAX_DRAFT_TOKENS, Engine
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request
from nextn.models.context import SequenceContext
from nextn.models.decoder import Decoder

PROMPT_TOKENS = 48
GROUPS = 32
"""Of prompts decoded together, at most."""
EMBEDDED = "embedded"
FORWARD_PROMPTS = 16
"""In one whole-sequence forward."""

Prompts = list[list[int]]


@dataclass(frozen=True)
class Job:
    """One way of decoding a model's prompts, by every batch size.

    Attributes:
        model: `EMBEDDED`, or a geometry that gets random weights.
        prompts, count: how many, and tokens each.
        k: draft tokens.
    """

    model: str
    prompts: int
    count: int
    batches: tuple[int, ...]
    k: int
    exact: bool

    def taken(self, batch: int) -> int:
        """Prompts that are decoded `batch` at a time."""
        return min(self.prompts, GROUPS * batch)


def model_and_prompts(job: Job) -> tuple[Decoder, Prompts]:
    """The same weights and prompts in every process."""
    torch.manual_seed(0)
    if job.model != EMBEDDED:
        model = random_model(GEOMETRIES[job.model])
        return model, torch.randint(0, model.config.vocab, (job.prompts, PROMPT_TOKENS)).tolist()
    loaded = api.load(dtype="bfloat16", device="cuda")
    assert loaded.tokenizer is not None
    text = loaded.tokenizer.encode(Path(argparse.__file__).read_text())
    step = (len(text) - PROMPT_TOKENS) // job.prompts
    if step < 1:
        raise SystemExit(f"The text has {len(text)} tokens, too few for {job.prompts} prompts.")
    return loaded.target, [list(text[i * step : i * step + PROMPT_TOKENS]) for i in range(job.prompts)]


def tokens_of(model: Decoder, prompts: Prompts, batch: int, k: int, count: int, *, exact: bool) -> Prompts:
    """The first `count` greedy tokens of each prompt, decoded `batch` at a time.

    A group goes on until all have as many: a batch that shrinks would want a graph for each of its sizes.
    """
    engine = Engine(model, draft_tokens=k, exact=exact)
    # The same for every K: room decides how many programs share a sequence's keys.
    limit = count * (MAX_DRAFT_TOKENS + 1)
    params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
    room = PROMPT_TOKENS + limit + spare_positions(MAX_DRAFT_TOKENS, 1)
    scheduler = engine.scheduler([room] * batch)
    found: Prompts = []
    for at in range(0, len(prompts), batch):
        group = [scheduler.add(Request(p, params)) for p in prompts[at : at + batch]]
        made: dict[int, list[int]] = {index: [] for index in group}
        while any(len(tokens) < count for tokens in made.values()):
            for s, _ in scheduler.step():
                if s.error is not None:
                    raise s.error
                made[s.index] = s.tokens
        for index in group:
            scheduler.cancel(index)
        while not scheduler.idle:
            scheduler.step()
        found += [made[index][:count] for index in group]
    return found


def run(job: Job) -> tuple[dict[int, Prompts], float]:
    """A job's tokens by batch size, and a sum over the weights, which must be the same in every process."""
    model, prompts = model_and_prompts(job)
    with patch.object(contexts, "available", lambda _: False):
        tokens = {
            batch: tokens_of(model, prompts[: job.taken(batch)], batch, job.k, job.count, exact=job.exact)
            for batch in job.batches
        }
    return tokens, float(sum(p.double().sum() for p in model.parameters()))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two equally long texts part, None where they do not."""
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)


def logits_at(model: Decoder, texts: Prompts, at: Sequence[int]) -> Iterator[Tensor]:
    """Logits [vocab] in float32 after the first at[i] ids of each of the equally long texts."""
    device = model.embed.weight.device
    for begin in range(0, len(texts), FORWARD_PROMPTS):
        ids = torch.tensor(texts[begin : begin + FORWARD_PROMPTS], device=device)
        positions = torch.arange(ids.shape[1], device=device).expand(ids.shape)
        post, _ = model(ids, SequenceContext(positions))
        for row, ends in zip(post, at[begin : begin + FORWARD_PROMPTS], strict=True):
            yield model.logits(row[ends - 1]).float()


@torch.inference_mode()
def near_ties(models: tuple[Decoder, Decoder], prompts: Prompts, a: Prompts, b: Prompts) -> list[tuple[float, float]]:
    """(gap, rounding) wherever the tokens of a prompt part.

    Args:
        models: the model in bf16 and in float32.
    """
    every = zip(prompts, a, b, map(first_difference, a, b), strict=True)
    parted = [(p, x, y, at) for p, x, y, at in every if at is not None]
    texts = [[*p, *x] for p, x, _, _ in parted]
    ends = [len(p) + at for p, _, _, at in parted]
    found = []
    both = (logits_at(model, texts, ends) for model in models)
    for (_, x, y, at), rounded, precise in zip(parted, *both, strict=True):
        gap = float(precise.max() - torch.minimum(precise[x[at]], precise[y[at]]))
        found.append((gap, float((rounded - precise).abs().max())))
    return found


def row_of(
    job: Job,
    batch: int,
    ties: Sequence[tuple[float, float]],
    plain: tuple[Prompts, Prompts],
    exact: tuple[Prompts, ...],
) -> dict[str, Any]:
    """One model's record at one batch size.

    Args:
        ties: from `near_ties`.
        plain, exact: tokens without and with the head.
    """
    parts = [first_difference(a, b) for a, b in zip(*plain, strict=True)]
    same = sum(job.count if at is None else at for at in parts)
    return {
        "model": job.model if job.model == EMBEDDED else f"random {job.model}",
        "batch": batch,
        "prompts": len(parts),
        "tokens_each": job.count,
        "draft_tokens": job.k,
        "parted": len(ties),
        "parted_per_1000_tokens": round(1000 * len(ties) / (same + len(ties)), 3),
        "near_ties": sum(gap <= 2 * rounding for gap, rounding in ties),
        "largest_gap": round(max((gap for gap, _ in ties), default=0.0), 4),
        "largest_gap_over_rounding": round(max((gap / rounding for gap, rounding in ties), default=0.0), 3),
        "parted_exact": sum(a != b for a, b in zip(*exact, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=positive, default=128)
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--draft-tokens", type=positive, default=3)
    parser.add_argument("--geometry", nargs="*", default=["0.8b"], choices=list(GEOMETRIES))
    parser.add_argument("--batch", nargs="+", type=positive, default=[1, 8, 128])
    parser.add_argument("--jobs", type=positive, default=8, help="processes at once, each with a model on the GPU")
    parser.add_argument("--out", type=Path, help="file for the record; without it only its rows are printed")
    options = parser.parse_args()
    need_gpu()
    began = time.monotonic()
    ways = [(0, False), (options.draft_tokens, False), (0, True), (options.draft_tokens, True)]
    jobs = [
        Job(name, options.prompts, options.tokens, tuple(options.batch), k, exact)
        for name in [EMBEDDED, *options.geometry]
        for k, exact in ways
    ]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        done = list(pool.map(run, jobs))
    rows = []
    for first in range(0, len(jobs), len(ways)):
        tokens, weights = zip(*done[first : first + len(ways)], strict=True)
        job = jobs[first + 1]
        model, prompts = model_and_prompts(job)
        if len(set(weights)) > 1:
            raise SystemExit(f"The processes had different weights of {job.model}: their sums are {weights}.")
        models = model, copy.deepcopy(model).float()
        for batch in options.batch:
            off, on, *exact = (found[batch] for found in tokens)
            ties = near_ties(models, prompts[: job.taken(batch)], off, on)
            rows.append(row_of(job, batch, ties, (off, on), tuple(exact)))
            print(json.dumps(rows[-1]), flush=True)
    record = {**provenance(), "seconds": round(time.monotonic() - began, 1), "rows": rows}
    print(f"{record['seconds']} s")
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
