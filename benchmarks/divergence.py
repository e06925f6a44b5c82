"""How often greedy tokens in bf16 differ with the head on and off, and whether each difference is a near-tie.

    python benchmarks/divergence.py --out benchmarks/results/divergence-h200.json

A verify of several rows rounds differently from a step of one, so where two logits are closer than the rounding, the
choice may flip and the texts part. For every first difference the logits of both tokens are computed again in
float32. `gap` is how far the lower of the two lies under the best; `rounding` is the largest error of a bf16 logit at
that position. A gap of at most twice the rounding is a near-tie. `--exact` decoding is run too: it must never differ.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from decode_setup import CUDA, random_model
from geometries import GEOMETRIES
from gpu_timing import provenance
from torch import Tensor

from nextn import api
from nextn.engine.engine import Engine
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request
from nextn.models.context import SequenceContext
from nextn.models.decoder import Decoder

PROMPT_TOKENS = 48


def tokens_of(model: Decoder, prompts: list[list[int]], k: int, count: int, *, exact: bool) -> list[list[int]]:
    """Greedy tokens of all prompts, decoded together."""
    engine = Engine(model, draft_tokens=k, exact=exact)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    found: dict[int, list[int]] = {}
    for news in engine.rounds([Request(p, params) for p in prompts]):
        found |= {s.index: s.tokens for s, _ in news}
    return [found[i] for i in range(len(prompts))]


def last_logits(model: Decoder, ids: list[int]) -> Tensor:
    """Logits after the last id, float32."""
    tokens = torch.tensor([ids], device=CUDA)
    post, _ = model(tokens, SequenceContext(torch.arange(len(ids), device=CUDA)[None]))
    return model.logits(post[:, -1])[0].float()


@torch.inference_mode()
def compare(name: str, model: Decoder, prompts: list[list[int]], k: int, count: int) -> dict[str, Any]:
    """One model's record."""
    plain, drafted = (tokens_of(model, prompts, n, count, exact=False) for n in (0, k))
    exact = [tokens_of(model, prompts, n, count, exact=True) for n in (0, k)]
    precise = copy.deepcopy(model).float()
    ties, same = [], 0
    for prompt, a, b in zip(prompts, plain, drafted, strict=True):
        at = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
        same += count if at is None else at
        if at is None:
            continue
        logits, rounded = (last_logits(m, [*prompt, *a[:at]]) for m in (precise, model))
        gap = float(logits.max() - torch.minimum(logits[a[at]], logits[b[at]]))
        ties.append((gap, float((rounded - logits).abs().max())))
    return {
        "model": name,
        "prompts": len(prompts),
        "tokens_each": count,
        "draft_tokens": k,
        "parted": len(ties),
        "parted_per_1000_tokens": round(1000 * len(ties) / (same + len(ties)), 3),
        "near_ties": sum(gap <= 2 * rounding for gap, rounding in ties),
        "largest_gap": round(max((gap for gap, _ in ties), default=0.0), 4),
        "largest_gap_over_rounding": round(max((gap / rounding for gap, rounding in ties), default=0.0), 3),
        "parted_exact": sum(a != b for a, b in zip(*exact, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--geometry", nargs="*", default=["0.8b"], choices=list(GEOMETRIES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    loaded = api.load(dtype="bfloat16", device="cuda")
    assert loaded.tokenizer is not None
    text = loaded.tokenizer.encode(Path(argparse.__file__).read_text())
    step = (len(text) - PROMPT_TOKENS) // options.prompts
    windows = [list(text[i * step : i * step + PROMPT_TOKENS]) for i in range(options.prompts)]
    rows = [compare("embedded", loaded.target, windows, options.draft_tokens, options.tokens)]
    for name in options.geometry:
        model = random_model(GEOMETRIES[name])
        ids = torch.randint(0, model.config.vocab, (options.prompts, PROMPT_TOKENS)).tolist()
        rows.append(compare(f"random {name}", model, ids, options.draft_tokens, options.tokens))
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
