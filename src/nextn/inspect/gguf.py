"""What a GGUF says about its head: families, dimensions and layouts by llama.cpp's names.

Names: gguf package, ``constants.py`` (``TENSOR_NAMES``, ``Keys.LLM``). The head is one more block after the target's:
``block_count`` includes it, ``nextn_predict_layers`` says how many there are. Only the fusion is pinned for every
architecture; the block's tensors are pinned where llama.cpp runs the head and its converter was read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nextn.checkpoint.source import Checkpoint
from nextn.families.blocks import Specs, linear, norm
from nextn.families.contract import Family, TensorSpec
from nextn.families.geometry import whole
from nextn.families.registry import FAMILIES

ARCHITECTURES: dict[str, str] = {
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
    "exaone-moe": "exaone_moe",
    "deepseek2": "deepseek_v3",
    "deepseek32": "deepseek_v3",
    "deepseek4": "deepseek_v4",
    "glm4moe": "glm4_moe",
    "glm-dsa": "glm_moe_dsa",
    "mimo2": "mimo_v2_flash",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "step35": "step3p5",
    "bailingmoe2": "bailing_moe_v2",
    "bailingmoe3": "bailing_hybrid",
    "hy-v3": "hy_v3",
}
"""``general.architecture`` -> family."""

PINNED = frozenset({"qwen3next", "qwen35", "qwen35moe"})
"""Architectures of which every tensor of the head's block is known."""

_KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("embedding_length",),
    "inter": ("feed_forward_length",),
    "heads": ("attention.head_count",),
    "kv_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length",),
    "v_head_dim": ("attention.value_length",),
    "experts": ("expert_count",),
    "moe_inter": ("expert_feed_forward_length",),
    "shared_inter": ("expert_shared_feed_forward_length",),
}
_HEAD_BLOCK = re.compile(r"blk\.(\d{1,6})\.nextn\.")
LOW_BITS = re.compile(r"I?Q[1-4]|TQ|MXFP4|NVFP4")
"""ggml types of at most about four bits a weight."""


def architecture(checkpoint: Checkpoint) -> str:
    return str(checkpoint.gguf.get("general.architecture", ""))


def family_of(checkpoint: Checkpoint) -> Family | None:
    """The family, with the layout of its head as GGUF stores it."""
    arch = architecture(checkpoint)
    name = ARCHITECTURES.get(arch)
    family = next((f for f in FAMILIES if f.name == name), None)
    if family is None:
        return None
    return replace(
        family,
        head=_layout(arch, family),
        prefixes=("",),
        foreign=(),
        layer_count=(f"{arch}.nextn_predict_layers",),
        default_layers=None,
        confidence="full" if arch in PINNED else "partial",
        note="" if arch in PINNED else "Of this architecture only the fusion's tensors are pinned.",
    )


def dimensions(checkpoint: Checkpoint) -> dict[str, int]:
    """Dimensions from the metadata. Raises NextnError for values that cannot be."""
    arch, metadata = architecture(checkpoint), checkpoint.gguf
    dims: dict[str, int] = {"one": 1, "q_gate": 2 if arch.startswith("qwen3") else 1}
    for name, spellings in _KEYS.items():
        for spelling in spellings:
            value = metadata.get(f"{arch}.{spelling}")
            if isinstance(value, list):
                numbers = [v for v in value if isinstance(v, int)]
                value = max(numbers, default=None)
            if isinstance(value, int):
                dims[name] = whole(value, f"{arch}.{spelling}")
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape:
        dims["vocab"] = embedding.shape[0]
    if "head_dim" not in dims and dims.get("heads") and "hidden" in dims:
        dims["head_dim"] = dims["hidden"] // dims["heads"]
    dims.setdefault("v_head_dim", dims.get("head_dim", 0))
    dims["moe"] = int(dims.get("experts", 0) > 0)
    dims["dense"] = 1 - dims["moe"]
    dims["tied"] = int("output.weight" not in checkpoint.tensors)
    dims["layers"] = depth(checkpoint)
    return dims


def declared(checkpoint: Checkpoint) -> tuple[int | None, str | None]:
    """How many head layers the metadata declares, and where."""
    path = f"{architecture(checkpoint)}.nextn_predict_layers"
    value = checkpoint.gguf.get(path)
    return (None, None) if value is None else (whole(value, path, 4096), path)


def depth(checkpoint: Checkpoint) -> int:
    """Number of the target's own blocks: all but those declared as heads, or those before the first that is one."""
    blocks = _whole_or(checkpoint.gguf, f"{architecture(checkpoint)}.block_count")
    count, _ = declared(checkpoint)
    if count:
        return max(0, blocks - count)
    heads = [int(m[1]) for k in checkpoint.tensors if (m := _HEAD_BLOCK.match(k))]
    return min(heads, default=blocks)


def _whole_or(metadata: Mapping[str, Any], path: str) -> int:
    value = metadata.get(path, 0)
    return whole(value, path, 1 << 20)


def _layout(arch: str, family: Family) -> Specs:
    block, key = "mtp.{i}.block", "blk.{n}"
    fusion = (
        linear("mtp.{i}.fuse", f"{key}.nextn.eh_proj", "hidden", "2*hidden"),
        norm("mtp.{i}.embed_norm", f"{key}.nextn.enorm"),
        norm("mtp.{i}.hidden_norm", f"{key}.nextn.hnorm"),
        norm("mtp.{i}.out_norm", f"{key}.nextn.shared_head_norm"),
        linear("mtp.{i}.embed", f"{key}.nextn.embed_tokens", "vocab", "hidden", optional=True),
        linear("mtp.{i}.head", f"{key}.nextn.shared_head_head", "vocab", "hidden", optional=True),
    )
    if arch not in PINNED:
        return (*fusion, *_unpinned(block, key))
    attention = (
        norm(f"{block}.input_norm", f"{key}.attn_norm"),
        norm(f"{block}.post_norm", f"{key}.post_attention_norm"),
        linear(f"{block}.attn.q", f"{key}.attn_q", "heads*head_dim*q_gate", "hidden"),
        linear(f"{block}.attn.k", f"{key}.attn_k", "kv_heads*head_dim", "hidden"),
        linear(f"{block}.attn.v", f"{key}.attn_v", "kv_heads*v_head_dim", "hidden"),
        linear(f"{block}.attn.o", f"{key}.attn_output", "hidden", "heads*v_head_dim"),
        norm(f"{block}.attn.q_norm", f"{key}.attn_q_norm", "head_dim"),
        norm(f"{block}.attn.k_norm", f"{key}.attn_k_norm", "head_dim"),
    )
    if arch == "qwen35":
        return (
            *fusion,
            *attention,
            linear(f"{block}.mlp.gate", f"{key}.ffn_gate", "inter", "hidden"),
            linear(f"{block}.mlp.up", f"{key}.ffn_up", "inter", "hidden"),
            linear(f"{block}.mlp.down", f"{key}.ffn_down", "hidden", "inter"),
        )
    moe = f"{block}.moe"
    return (
        *fusion,
        *attention,
        linear(f"{moe}.router", f"{key}.ffn_gate_inp", "experts", "hidden"),
        _stacked(f"{moe}.experts.gate", f"{key}.ffn_gate_exps", "moe_inter", "hidden"),
        _stacked(f"{moe}.experts.up", f"{key}.ffn_up_exps", "moe_inter", "hidden"),
        _stacked(f"{moe}.experts.down", f"{key}.ffn_down_exps", "hidden", "moe_inter"),
        linear(f"{moe}.shared.gate", f"{key}.ffn_gate_shexp", "shared_inter", "hidden"),
        linear(f"{moe}.shared.up", f"{key}.ffn_up_shexp", "shared_inter", "hidden"),
        linear(f"{moe}.shared.down", f"{key}.ffn_down_shexp", "hidden", "shared_inter"),
        TensorSpec(f"{moe}.shared_gate.weight", f"{key}.ffn_gate_inp_shexp.weight", ("hidden",)),
    )


def _stacked(name: str, key: str, out: str, into: str) -> TensorSpec:
    return TensorSpec(f"{name}.weight", f"{key}.weight", ("experts", out, into))


def _unpinned(block: str, key: str) -> Specs:
    """Everything that a block may hold, none of it required, of any shape."""
    matrices = (
        "attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", "attn_q_a", "attn_q_b", "attn_kv_a_mqa",
        "attn_kv_b", "attn_k_b", "attn_v_b", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp", "ffn_gate_shexp",
        "ffn_up_shexp", "ffn_down_shexp",
    )  # fmt: skip
    norms = (
        "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "attn_q_a_norm",
        "attn_kv_a_norm", "attn_output_norm",
    )  # fmt: skip
    stacked = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")
    return (
        *(linear(f"{block}.{m}", f"{key}.{m}", "?", "?", optional=True) for m in matrices),
        *(norm(f"{block}.{n}", f"{key}.{n}", "?", optional=True) for n in norms),
        *(TensorSpec(f"{block}.{s}.weight", f"{key}.{s}.weight", ("?", "?", "?"), optional=True) for s in stacked),
        *(TensorSpec(f"{block}.{m}.bias", f"{key}.{m}.bias", ("?",), optional=True) for m in matrices[:4]),
        TensorSpec(f"{block}.router.bias", f"{key}.exp_probs_b.bias", ("?",), optional=True),
    )
