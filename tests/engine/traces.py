"""Random lives of a scheduler on a tiny model, and what each request gets alone.

A trace draws everything: pool, pages, slots, snapshots or replay, chunks, prompt budget, draft lengths that change
from round to round, results read at once or a round late, arrivals, cancellations, sampling. In float64 rounding
flips no choice, so each request must get exactly its own tokens: greedy ones those of plain whole-sequence forwards,
without cache, head or engine code; sampled ones, and a share of the greedy ones, those of the same request decoded
alone with the same draft lengths, rounds included. Of that share the drafts are compared with whole-sequence forwards
of the head too. The same lives can be led over graphs (`tests.engine.replayed` on a CPU), late by nature.
"""

from __future__ import annotations

import functools
import math
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nextn.checkpoint.source import open_checkpoint
from nextn.engine.admission import spare_positions
from nextn.engine.cache import Cache
from nextn.engine.draft_length import Observed
from nextn.engine.executor import EagerExecutor
from nextn.engine.graphs import GraphExecutor
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request, Running
from nextn.engine.runner import PlainRunner
from nextn.engine.sampling import SamplingState, adjust
from nextn.engine.scheduler import Scheduler
from nextn.models.context import SequenceContext
from nextn.models.decoder import Decoder
from nextn.models.load import load_decoder
from tests.engine.models import plain_drafts
from tests.engine.replayed import Far
from tests.oracle.checkpoints import make_checkpoint

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "max_position_embeddings": 200,
}
MOST = 4
REPEATED = 0.2
"""Share of greedy requests that are also decoded alone by the engine."""


@functools.cache
def tiny(vocab: int = 11, seed: int = 0) -> Decoder:
    """A hybrid decoder of two layers with its head, in float64. Small vocabularies accept more drafts."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_checkpoint(Path(folder), "qwen3_5", seed=seed, vocab_size=vocab, **SIZES)
        return load_decoder(open_checkpoint(made), dtype=torch.float64, device=CPU)[0]


class DrawnLength:
    """K at random for each round, often the same for a while."""

    def __init__(self, rng: random.Random, most: int) -> None:
        self.rng, self.most, self.now = rng, most, rng.randint(0, most)

    def choose(self, requests: Sequence[int]) -> int:
        if self.rng.random() < 0.5:
            self.now = self.rng.randint(0, self.most)
        return self.now

    def observe(self, seen: Observed) -> None:
        assert len(seen.requests) == len(seen.accepted) <= seen.size
        assert all(0 <= a <= seen.draft_tokens for a in seen.accepted)

    def forget(self, request: int) -> None: ...


class GivenLengths:
    """The draft lengths of a list, one a round, then 0."""

    def __init__(self, lengths: Sequence[int], most: int) -> None:
        self.lengths, self.most = list(lengths), most

    def choose(self, requests: Sequence[int]) -> int:
        return self.lengths.pop(0) if self.lengths else 0

    def observe(self, seen: Observed) -> None: ...

    def forget(self, request: int) -> None: ...


@dataclass
class Outcome:
    """What a trace did, for counting."""

    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    pauses: int = 0
    cancelled: int = 0
    lengths: set[int] = field(default_factory=set)


def drawn_request(rng: random.Random, vocab: int) -> Request:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": rng.choice((1, 3, 8, 14, 20))}
    if rng.random() < 0.35:
        options |= {"temperature": rng.choice((0.5, 1.0, 1.4)), "seed": rng.randrange(1000)}
        options |= rng.choice(({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}))
    if rng.random() < 0.2:
        options |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2}
    if rng.random() < 0.2:
        options["logit_bias"] = {rng.randrange(vocab): rng.uniform(-2, 2)}
    if rng.random() < 0.15:
        options["stop_token_ids"] = [rng.randrange(vocab)]
        options["min_tokens"] = rng.randint(0, options["max_tokens"])
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 9))]
    return Request(prompt, SamplingParams(**options))


def with_reports(request: Request, asked: int) -> Request:
    return replace(request, params=replace(request.params, logprobs=asked))


def run_trace(seed: int, *, graphs: bool = False) -> Outcome:
    """Live through a trace and compare every request with itself alone.

    Args:
        graphs: run rounds by the graph executor, which keeps a page and a slot; half of the requests then ask for log
            probabilities.
    Raises:
        AssertionError: a request got other tokens, something leaked, or the scheduler did not come to rest.
    """
    rng = random.Random(seed)
    vocab = rng.choice((5, 9))
    model = tiny(vocab, vocab)
    most, ahead = rng.randint(0, MOST), rng.randint(0, 1)
    requests = [drawn_request(rng, vocab) for _ in range(rng.randint(2, 5))]
    if graphs:
        ahead = 1
        requests = [with_reports(r, i) if i % 2 else r for i, r in enumerate(requests)]
    page_size = rng.randint(1, 5)
    largest = max(len(r.prompt) + (r.params.max_tokens or 0) for r in requests) + spare_positions(most, ahead)
    pages = -(-largest // page_size) + rng.choice((0, 0, 1, 2, 4, 100))
    slots = rng.randint(2, 5)
    cache = Cache(
        model.config,
        pages=pages + graphs,
        page_size=page_size,
        sequences=slots + graphs,
        rows=most + 1,
        dtype=torch.float64,
        device=CPU,
        replay=rng.random() < 0.5,
    )
    rng.shuffle(cache.free_pages)
    runner = Far(model, model) if graphs else PlainRunner(model, model)
    executor = GraphExecutor(runner, cache) if graphs else EagerExecutor(runner, cache, ahead)
    kept = ([executor.page], [executor.slot]) if isinstance(executor, GraphExecutor) else ([], [])
    scheduler = Scheduler(
        runner,
        cache,
        DrawnLength(rng, most),
        executor=executor,
        chunk=rng.randint(1, 8),
        prompt_rows=rng.choice((None, 1, 3, 8, 16)),
    )
    arrivals = sorted(rng.randint(0, 8) for _ in requests)
    cancels = {rng.randint(0, 20): rng.randrange(len(requests)) for _ in requests if rng.random() < 0.15}
    found: dict[int, Running] = {}
    step = 0
    while step <= max([*arrivals, *cancels]) or not scheduler.idle:
        for request, at in zip(requests, arrivals, strict=True):
            if at == step:
                scheduler.add(request)
        if step in cancels:
            scheduler.cancel(cancels[step])
        found |= {s.index: s for s, _ in scheduler.step()}
        step += 1
        assert step < 3000, "the scheduler does not come to rest"
    assert sorted([*cache.free_pages, *kept[0]]) == list(range(pages + graphs)), "pages leaked"
    assert sorted([*cache.free_slots, *kept[1]]) == list(range(slots + graphs)), "slots leaked"
    outcome = Outcome(requests=len(requests))
    for index, request in enumerate(requests):
        s = found.get(index)
        if s is None:
            assert index in cancels.values(), "a request got nothing"
            outcome.cancelled += 1
            continue
        assert s.finish is not None
        assert s.finish != "error"
        compare(model, request, s, most, repeat=rng.random() < REPEATED)
        outcome.cancelled += s.finish == "cancelled"
        outcome.tokens += len(s.tokens)
        outcome.rounds += len(s.rounds)
        outcome.accepted += sum(r.accepted for r in s.rounds)
        outcome.pauses += s.pauses
        outcome.lengths |= {len(r.drafts) for r in s.rounds}
    return outcome


@torch.inference_mode()
def compare(model: Decoder, request: Request, s: Running, most: int, *, repeat: bool) -> None:
    """Hold a sequence to what its request gets alone; a cancelled one to the beginning of it."""
    assert [p.token for p in s.logprobs] == (s.tokens if request.params.logprobs is not None else [])
    if request.params.greedy:
        assert s.tokens == choices(model, request, s.tokens), "not the target's own tokens"
    if request.params.greedy and not repeat:
        return
    adjusted = request.params.penalised or request.params.logit_bias or request.params.min_tokens
    if request.params.greedy and not adjusted:
        ids = list(request.prompt) + s.tokens[:1]
        for r in s.rounds:
            assert list(r.drafts) == plain_drafts(model, ids, len(r.drafts)), "not the head's own drafts"
            ids += r.tokens
    alone = decode_alone(model, request, [len(r.drafts) for r in s.rounds], most)
    if s.finish == "cancelled":
        assert alone.tokens[: len(s.tokens)] == s.tokens
        assert alone.rounds[: len(s.rounds)] == s.rounds
    else:
        assert (alone.tokens, alone.rounds, alone.finish) == (s.tokens, s.rounds, s.finish)
    for mine, theirs in zip(s.logprobs, alone.logprobs, strict=False):
        assert [i for i, _ in mine.top] == [i for i, _ in theirs.top]
        assert math.isclose(mine.logprob, theirs.logprob, abs_tol=1e-5)


def choices(model: Decoder, request: Request, tokens: list[int]) -> list[int]:
    """The target's greedy choice before each of the tokens, all in one forward."""
    prompt = list(request.prompt)
    ids = torch.tensor([[*prompt, *tokens]])
    hidden, _ = model(ids, SequenceContext(torch.arange(ids.shape[1])[None]))
    logits = model.logits(hidden)[:, len(prompt) - 1 : -1]
    state = SamplingState.build(
        [request.params],
        [prompt],
        vocab_size=model.config.vocab,
        stop_ids=[request.params.stop_ids(request.eos)],
    )
    out = []
    for i in range(len(tokens)):
        out.append(int(adjust(logits[:, i : i + 1], state).argmax()))
        state.commit(torch.tensor([[tokens[i]]]), torch.tensor([1]))
    return out


def decode_alone(model: Decoder, request: Request, lengths: Sequence[int], most: int) -> Running:
    """The request with a scheduler of its own, roomy and never late, and these draft lengths."""
    positions = len(request.prompt) + (request.params.max_tokens or 0) + spare_positions(most, 0)
    cache = Cache(
        model.config, pages=1, page_size=positions, sequences=1, rows=most + 1, dtype=torch.float64, device=CPU
    )
    scheduler = Scheduler(PlainRunner(model, model), cache, GivenLengths(lengths, most))
    scheduler.add(request)
    found: list[Running] = []
    while not scheduler.idle:
        found += [s for s, _ in scheduler.step()]
    return found[0]
