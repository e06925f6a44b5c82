"""GGUF: how llama.cpp names and counts MTP heads, as `Family` values of their own over the same canonical names.

The head's layers are the last blocks of ``{arch}.block_count``, as many as ``{arch}.nextn_predict_layers`` says; the
fusion sits under ``blk.{n}.nextn.``. Norms are stored ready for use (Qwen's with the one added), experts stacked a
projection. Names: gguf package ``constants.py``, which lists a head for glm4, glm4moe, glm-dsa, exaone-moe and
bailingmoe2 as of 0.19; the other architectures follow what later llama.cpp releases are reported to run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from nextn.errors import NextnError
from nextn.families.contract import Family, TensorSpec
from nextn.families.geometry import COUNT_LIMIT, COUNTS, LIMIT, Sizes, whole

LAYER = "blk.{n}"
HEAD_BLOCK = re.compile(r"blk\.(\d{1,6})\.nextn\.")

ARCHITECTURES: dict[str, tuple[str, str]] = {
    "qwen3next": ("qwen3_next", "gated"),
    "qwen35": ("qwen3_5", "gated"),
    "qwen35moe": ("qwen3_5_moe", "gated"),
    "glm4moe": ("glm4_moe", "gqa"),
    "glm4": ("glm_ocr", "ocr"),
    "glm-dsa": ("glm_moe_dsa", "mla"),
    "deepseek2": ("deepseek_v3", "mla"),
    "deepseek32": ("deepseek_v3", "mla"),
    "exaone-moe": ("exaone_moe", "gqa"),
    "bailingmoe2": ("bailing_moe_v2", "fused"),
    "bailingmoe3": ("bailing_hybrid", "mla"),
    "hy-v3": ("hy_v3", "gqa"),
    "mimo2": ("mimo_v2_flash", "gqa"),
    "step35": ("step3p5", "gqa"),
    "deepseek4": ("deepseek_v4", "free"),
    "nemotron_h": ("nemotron_h", "free"),
    "nemotron_h_moe": ("nemotron_h", "free"),
}
"""llama.cpp architecture -> (family, kind of attention), for those that run a head. Of ``free`` ones only the fusion
is known."""

KEPT_ONLY = frozenset({"exaone-moe"})
"""Architectures whose converter keeps the head though no graph runs it."""

DENSE_HEADS = frozenset({"exaone-moe", "mimo2", "step35"})
"""Sparse architectures whose head layer is dense."""

METADATA: dict[str, tuple[str, ...]] = {
    "hidden": ("embedding_length",),
    "inter": ("feed_forward_length",),
    "heads": ("attention.head_count",),
    "kv_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length",),
    "v_head_dim": ("attention.value_length",),
    "experts": ("expert_count",),
    "experts_per_token": ("expert_used_count",),
    "moe_inter": ("expert_feed_forward_length",),
    "shared_inter": ("expert_shared_feed_forward_length",),
    "shared_experts": ("expert_shared_count",),
    "q_lora": ("attention.q_lora_rank",),
    "kv_lora": ("attention.kv_lora_rank",),
    "qk_rope": ("rope.dimension_count",),
    "index_heads": ("attention.indexer.head_count",),
    "index_dim": ("attention.indexer.key_length",),
    "vocab": ("vocab_size",),
}
"""Dimension -> metadata keys after the architecture's name."""


def spec(name: str, key: str, *shape: str, when: tuple[str, ...] = (), optional: bool = False) -> TensorSpec:
    return TensorSpec(f"mtp.{{i}}.{name}", f"{LAYER}.{key}", shape, when, optional)


def fusion() -> tuple[TensorSpec, ...]:
    return (
        spec("embed_norm.weight", "nextn.enorm.weight", "hidden"),
        spec("hidden_norm.weight", "nextn.hnorm.weight", "hidden"),
        spec("fuse.weight", "nextn.eh_proj.weight", "hidden", "2*hidden"),
        spec("out_norm.weight", "nextn.shared_head_norm.weight", "hidden"),
        spec("embed.weight", "nextn.embed_tokens.weight", "vocab", "hidden", optional=True),
        spec("head.weight", "nextn.shared_head_head.weight", "vocab", "hidden", optional=True),
    )


def attention(kind: str) -> tuple[TensorSpec, ...]:
    """Attention of a block; sizes that head counts a layer would change are not pinned."""
    gated = kind == "gated"
    out = spec("block.attn.o.weight", "attn_output.weight", "hidden", "heads*v_head_dim" if gated else "?")
    if kind == "mla":
        low = ("q_lora",)
        return (
            spec("block.attn.q_a.weight", "attn_q_a.weight", "q_lora", "hidden", when=low),
            spec("block.attn.q_a_norm.weight", "attn_q_a_norm.weight", "q_lora", when=low),
            spec("block.attn.q_b.weight", "attn_q_b.weight", "?", "q_lora", when=low),
            spec("block.attn.q.weight", "attn_q.weight", "?", "hidden", when=("!q_lora",)),
            spec("block.attn.kv_a.weight", "attn_kv_a_mqa.weight", "?", "hidden"),
            spec("block.attn.kv_a_norm.weight", "attn_kv_a_norm.weight", "kv_lora"),
            spec("block.attn.kv_b.weight", "attn_kv_b.weight", "?", "kv_lora", optional=True),
            spec("block.attn.k_b.weight", "attn_k_b.weight", "?", "?", "?", optional=True),
            spec("block.attn.v_b.weight", "attn_v_b.weight", "?", "?", "?", optional=True),
            out,
            spec("block.attn.index.q_b.weight", "indexer.attn_q_b.weight", "?", "q_lora", when=("index_heads",)),
            spec("block.attn.index.k.weight", "indexer.attn_k.weight", "?", "hidden", when=("index_heads",)),
            spec("block.attn.index.k_norm.weight", "indexer.k_norm.weight", "?", when=("index_heads",)),
            spec("block.attn.index.k_norm.bias", "indexer.k_norm.bias", "?", when=("index_heads",)),
            spec("block.attn.index.weights.weight", "indexer.proj.weight", "?", "hidden", when=("index_heads",)),
        )
    norms = tuple(
        spec(f"block.attn.{p}_norm.weight", f"attn_{p}_norm.weight", "head_dim", optional=not gated) for p in "qk"
    )
    if kind == "fused":
        return (spec("block.attn.qkv.weight", "attn_qkv.weight", "?", "hidden"), *norms, out)
    widths = {"q": "2*heads*head_dim", "k": "kv_heads*head_dim", "v": "kv_heads*v_head_dim"}
    projections = tuple(
        spec(f"block.attn.{p}.weight", f"attn_{p}.weight", width if gated else "?", "hidden")
        for p, width in widths.items()
    )
    if gated:
        return (*projections, *norms, out)
    biases = tuple(spec(f"block.attn.{p}.bias", f"attn_{p}.bias", "?", optional=True) for p in "qkv")
    extras = (
        spec("block.attn.sink", "attn_sinks.weight", "?", optional=True),
        spec("block.attn.gate.weight", "attn_gate.weight", "?", "hidden", optional=True),
    )
    return (*projections, *biases, *norms, *extras, out)


def feed_forward(kind: str) -> tuple[TensorSpec, ...]:
    """Dense or sparse, as the geometry says; OCR's dense layer fuses gate and up."""
    gated = kind == "gated"
    sparse, shared = ("mtp_moe",), ("mtp_moe", "shared_inter")
    inter, shared_inter = ("inter", "shared_inter") if gated else ("?", "?")
    dense = tuple(
        spec(f"block.mlp.{p}.weight", f"ffn_{p}.weight", *shape, when=("!mtp_moe",), optional=kind == "ocr")
        for p, shape in (("gate", (inter, "hidden")), ("up", (inter, "hidden")), ("down", ("hidden", inter)))
    )
    projection = ("experts", "moe_inter", "hidden")
    both = spec("block.moe.experts.gate_up", "ffn_gate_up_exps.weight", "experts", "2*moe_inter", "hidden", when=sparse)
    stacked = (
        replace(spec("block.moe.experts.gate", "ffn_gate_exps.weight", *projection, when=sparse), experts="split"),
        replace(spec("block.moe.experts.up", "ffn_up_exps.weight", *projection, when=sparse), experts="split"),
        replace(both, experts="grouped"),
        spec("block.moe.experts.down", "ffn_down_exps.weight", "experts", "hidden", "moe_inter", when=sparse),
    )
    return (
        *dense,
        spec("block.moe.router.weight", "ffn_gate_inp.weight", "experts", "hidden", when=sparse),
        spec("block.moe.router_bias", "exp_probs_b.bias", "experts", when=sparse, optional=gated),
        *stacked,
        *(
            spec(f"block.moe.shared.{p}.weight", f"ffn_{p}_shexp.weight", *shape, when=shared)
            for p, shape in (
                ("gate", (shared_inter, "hidden")),
                ("up", (shared_inter, "hidden")),
                ("down", ("hidden", shared_inter)),
            )
        ),
        spec("block.moe.shared_gate.weight", "ffn_gate_inp_shexp.weight", "hidden", when=shared, optional=not gated),
    )


def free() -> tuple[TensorSpec, ...]:
    """Everything that a block may hold, none of it required, of any shape."""
    matrices = (
        "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b", "ffn_gate",
        "ffn_up", "ffn_down", "ffn_gate_inp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
    )  # fmt: skip
    vectors = (
        "attn_norm", "post_attention_norm", "ffn_norm", "attn_q_norm", "attn_k_norm", "attn_q_a_norm", "attn_kv_a_norm",
        "attn_sinks",
    )  # fmt: skip
    stacked = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    return (
        *(spec(f"block.{m}.weight", f"{m}.weight", "?", "?", optional=True) for m in matrices),
        *(spec(f"block.{v}.weight", f"{v}.weight", "?", optional=True) for v in vectors),
        *(spec(f"block.{s}.weight", f"{s}.weight", "?", "?", "?", optional=True) for s in stacked),
        spec("block.router_bias", "exp_probs_b.bias", "?", optional=True),
    )


def norms(kind: str) -> tuple[TensorSpec, ...]:
    """The block's norms; the second is called ``post_attention_norm`` by some architectures, ``ffn_norm`` by others."""
    first = spec("block.input_norm.weight", "attn_norm.weight", "hidden")
    if kind == "ocr":
        return (
            first,
            spec("block.post_norm.weight", "ffn_norm.weight", "hidden"),
            spec("block.post_attn_norm.weight", "post_attention_norm.weight", "hidden"),
            spec("block.post_mlp_norm.weight", "post_ffw_norm.weight", "hidden"),
        )
    second = spec("block.post_norm.weight", "post_attention_norm.weight", "hidden")
    return first, replace(second, aliases=(f"{LAYER}.ffn_norm.weight",))


@cache
def gguf_family(architecture: str) -> Family | None:
    """The layout of a GGUF's head by ``general.architecture``; None where llama.cpp knows no head there."""
    if architecture not in ARCHITECTURES:
        return None
    name, kind = ARCHITECTURES[architecture]
    return Family(
        name=name,
        title=f"{architecture} (GGUF)",
        architectures=(),
        model_types=(),
        layer_count=(f"{architecture}.nextn_predict_layers",),
        default_layers=None,
        head=(*fusion(), *(free() if kind == "free" else (*norms(kind), *attention(kind), *feed_forward(kind)))),
        block="as the family's, in llama.cpp's names",
        ships_copies=True,
        confidence="full" if kind == "gated" else "partial",
        note={"gated": "", "free": "Of this architecture only the fusion's tensors are pinned."}.get(
            kind, "Sizes of attention are not pinned: metadata may give them a layer."
        ),
        source="gguf/constants.py",
    )


def gguf_declared(metadata: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """How many head layers a GGUF declares, and by which key. Raises NextnError for a value that cannot be."""
    path = f"{metadata.get('general.architecture')}.nextn_predict_layers"
    value = metadata.get(path)
    return (None, None) if value is None else (whole(value, path, 4096), path)


def gguf_geometry(metadata: Mapping[str, Any], tensors: Iterable[str] = ()) -> Sizes:
    """Dimensions and flags of a GGUF; ``layers`` counts the target's layers, without the head's.

    Args:
        tensors: their names, which say where the head begins if the metadata does not.
    Raises:
        NextnError: the declared count of head layers cannot be.
    """
    architecture = metadata.get("general.architecture")
    dims = Sizes()
    for name, keys in METADATA.items():
        for key in keys:
            value = metadata.get(f"{architecture}.{key}")
            if isinstance(value, list) and value:
                value = value[-1]
            if value is None or isinstance(value, (list, dict)):
                continue
            try:
                dims[name] = whole(value, f"{architecture}.{key}", COUNT_LIMIT if name in COUNTS else LIMIT)
            except NextnError as error:
                dims.bad[name] = error
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab" not in dims and isinstance(tokens, dict) and isinstance(tokens.get("length"), int):
        dims["vocab"] = tokens["length"]
    blocks = metadata.get(f"{architecture}.block_count")
    heads = gguf_declared(metadata)[0] or 0
    if isinstance(blocks, int) and not isinstance(blocks, bool) and heads <= blocks <= COUNT_LIMIT:
        found = [int(match[1]) for name in tensors if (match := HEAD_BLOCK.match(name))] if not heads else []
        dims["layers"] = min(found, default=blocks - heads)
    if "kv_heads" not in dims and "heads" in dims:
        dims["kv_heads"] = dims["heads"]
    if "head_dim" not in dims and dims.get("heads") and "hidden" in dims:
        dims["head_dim"] = dims["hidden"] // dims["heads"]
    if "v_head_dim" not in dims and "head_dim" in dims:
        dims["v_head_dim"] = dims["head_dim"]
    if dims.get("shared_experts") and "shared_inter" not in dims and "moe_inter" in dims:
        dims["shared_inter"] = dims["shared_experts"] * dims["moe_inter"]
    dims["one"] = 1
    dims["moe"] = int(dims.get("experts", 0) > 0)
    dims["mtp_moe"] = int(bool(dims["moe"]) and architecture not in DENSE_HEADS)
    return dims
