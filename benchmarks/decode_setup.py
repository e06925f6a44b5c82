"""Qwen3.5 geometries with random weights, caches of a random past, and the bytes that a step or a round must move."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.geometries import VOCAB, Geometry
from nextn.engine.batch import Batch
from nextn.engine.cache import Cache
from nextn.engine.logits import power_of_two
from nextn.engine.sampling import SamplingParams, SamplingState
from nextn.models.config import decoder_config
from nextn.models.decoder import Decoder
from nextn.models.load import build

PAGE = 64
TIED = {"0.8b": True, "4b": True, "9b": False}
CUDA = torch.device("cuda")


def config_of(g: Geometry) -> dict[str, Any]:
    """config.json of a geometry."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": g.hidden,
        "intermediate_size": g.inter,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "linear_num_key_heads": g.k_heads,
        "linear_num_value_heads": g.v_heads,
        "linear_key_head_dim": g.gdn_dim,
        "linear_value_head_dim": g.gdn_dim,
        "linear_conv_kernel_dim": 4,
        "vocab_size": VOCAB,
        "tie_word_embeddings": TIED[g.name],
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 4096,
    }


@torch.no_grad()
def random_model(g: Geometry) -> Decoder:
    """Weights that keep activations in range."""
    model = build(decoder_config(config_of(g)), dtype=torch.bfloat16, device=CUDA)
    for param in model.parameters():
        if param.dim() == 2:
            param.normal_(0, param.shape[1] ** -0.5)
        else:
            param.normal_(0, 0.1)
    return model


GREEDY = SamplingParams(temperature=0.0)


def batch_of(
    model: Decoder,
    cache: Cache,
    size: int,
    context: int,
    k: int,
    *,
    head: bool = True,
    params: SamplingParams = GREEDY,
) -> Batch:
    """Sequences with random tokens, `context` positions of random past; without the `head`, verify alone."""
    pages, slots = zip(*(cache.take(context + 600) for _ in range(size)), strict=True)
    sampling = SamplingState.build([params] * size, [[0]] * size, vocab_size=VOCAB, device=CUDA)
    law = None
    if k and not params.greedy:
        law = torch.randn(size, k, VOCAB, device=CUDA).softmax(-1)
    # A batch without head states is not drafted for.
    states = [torch.randn(size, 1, model.config.hidden, dtype=torch.bfloat16, device=CUDA) if k and head else None] * 2
    return Batch(
        lengths=torch.full((size,), context, device=CUDA),
        bonus=torch.randint(0, VOCAB, (size,), device=CUDA),
        drafts=torch.randint(0, VOCAB, (size, k), device=CUDA),
        draft_probs=law,
        committed=torch.zeros(size, dtype=torch.int64, device=CUDA),
        table=torch.tensor(pages, device=CUDA),
        slots=torch.tensor(slots, device=CUDA),
        sampling=sampling,
        bound=context,
        head_out=states[0],
        head_hidden=states[1],
    )


def floor_ms(model: Decoder, size: int, context: int, k: int, gb_per_s: float, drafted: int = VOCAB) -> float:
    """Least time by bytes of a round at K (0: a step) that drafts from so many ids."""
    c = model.config
    head = sum(p.numel() * p.element_size() for p in model.mtp.parameters()) if model.mtp is not None else 0
    output = model.output_weight.numel() * 2
    layers = sum(p.numel() * p.element_size() for p in model.layers.parameters())
    states = 2 * c.linear_layers * c.gdn_v_heads * c.gdn_k_dim * c.gdn_v_dim * 4
    kv = context * c.kv_heads * c.head_dim * 2 * 2
    moved = layers + output + size * (states + c.full_layers * kv) + k * (head + output * drafted // VOCAB + size * kv)
    return moved / gb_per_s / 1e6


def cache_of(model: Decoder, size: int, context: int, rows: int) -> Cache:
    """Pools for `size` sequences and the padding of graphs, filled with random numbers."""
    cache = Cache(
        model.config,
        pages=(power_of_two(size) + 2) * (-(-(context + 700) // PAGE)),
        page_size=PAGE,
        sequences=size + 2,
        rows=rows,
        dtype=torch.bfloat16,
        device=CUDA,
        replay=True,
    )
    for pool in (cache.k, cache.v, cache.draft_k, cache.draft_v, cache.conv):
        pool.normal_(0, 0.5)
    cache.states.normal_(0, 0.1)
    return cache
