"""DeepSeek V4: a head under ``mtp.{i}.`` in the original names, fused by a sum over residual streams.

The hidden state is a bundle of ``hc_mult`` streams; the embedding's projection is added to each stream's. The layer's
attention has no compressor (its compress ratio is 0 in the engines). V4-Flash 0731 and V4.1 put another drafter
(DSpark) under the same prefix: ``main_proj``, ``markov_head`` and ``confidence_head`` tell it, while its decoder
blocks carry the same names as the head's. Layout: vLLM ``models/deepseek_v4/nvidia/mtp.py`` and ``model.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import INV_FREQ

LAYER = "mtp.{i}"


def head() -> tuple[TensorSpec, ...]:
    name, block, moe = "mtp.{i}", "mtp.{i}.block", "mtp.{i}.block.moe"
    attn = f"{LAYER}.attn"
    return (
        blocks.norm(f"{name}.embed_norm", f"{LAYER}.enorm"),
        blocks.norm(f"{name}.hidden_norm", f"{LAYER}.hnorm"),
        blocks.linear(f"{name}.fuse_embed", f"{LAYER}.e_proj", "hidden", "hidden"),
        blocks.linear(f"{name}.fuse_hidden", f"{LAYER}.h_proj", "hidden", "hidden"),
        blocks.norm(f"{name}.out_norm", f"{LAYER}.norm"),
        blocks.tensor(f"{name}.streams.fn", f"{LAYER}.hc_head_fn", "streams", "streams*hidden"),
        blocks.tensor(f"{name}.streams.base", f"{LAYER}.hc_head_base", "streams"),
        blocks.tensor(f"{name}.streams.scale", f"{LAYER}.hc_head_scale", "one"),
        blocks.norm(f"{block}.input_norm", f"{LAYER}.attn_norm"),
        blocks.norm(f"{block}.post_norm", f"{LAYER}.ffn_norm"),
        *mixing(f"{block}.attn_streams", f"{LAYER}.hc_attn"),
        *mixing(f"{block}.moe_streams", f"{LAYER}.hc_ffn"),
        blocks.linear(f"{block}.attn.q_a", f"{attn}.wq_a", "q_lora", "hidden"),
        blocks.norm(f"{block}.attn.q_a_norm", f"{attn}.q_norm", "q_lora"),
        blocks.linear(f"{block}.attn.q_b", f"{attn}.wq_b", "heads*head_dim", "q_lora"),
        blocks.linear(f"{block}.attn.kv", f"{attn}.wkv", "head_dim", "hidden"),
        blocks.norm(f"{block}.attn.kv_norm", f"{attn}.kv_norm", "head_dim"),
        blocks.linear(f"{block}.attn.o_a", f"{attn}.wo_a", "o_groups*o_lora", "o_in"),
        blocks.linear(f"{block}.attn.o_b", f"{attn}.wo_b", "hidden", "o_groups*o_lora"),
        blocks.tensor(f"{block}.attn.sink", f"{attn}.attn_sink", "heads"),
        blocks.linear(f"{moe}.router", f"{LAYER}.ffn.gate", "experts", "hidden"),
        blocks.tensor(f"{moe}.router_bias", f"{LAYER}.ffn.gate.bias", "experts"),
        *blocks.named_experts(f"{moe}.experts", f"{LAYER}.ffn.experts", "w1", "w3", "w2"),
        blocks.linear(f"{moe}.shared.gate", f"{LAYER}.ffn.shared_experts.w1", "shared_inter", "hidden"),
        blocks.linear(f"{moe}.shared.up", f"{LAYER}.ffn.shared_experts.w3", "shared_inter", "hidden"),
        blocks.linear(f"{moe}.shared.down", f"{LAYER}.ffn.shared_experts.w2", "hidden", "shared_inter"),
        *blocks.copies(LAYER, "emb.tok_emb", "head"),
    )


def mixing(name: str, key: str) -> tuple[TensorSpec, ...]:
    """Stream mixing before and after a sublayer: pre, post and combine weights in one matrix."""
    return (
        blocks.tensor(f"{name}.fn", f"{key}_fn", "2*streams+streams*streams", "streams*hidden"),
        blocks.tensor(f"{name}.base", f"{key}_base", "2*streams+streams*streams"),
        blocks.tensor(f"{name}.scale", f"{key}_scale", "3"),
    )


def derive(text: Mapping[str, Any]) -> dict[str, int]:
    """Input width of the grouped output projection: heads * head_dim / o_groups."""
    heads, head_dim, groups = (text.get(k) for k in ("num_attention_heads", "head_dim", "o_groups"))
    if isinstance(heads, int) and isinstance(head_dim, int) and isinstance(groups, int) and groups > 0:
        return {"o_in": heads * head_dim // groups}
    return {}


DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    title="DeepSeek V4",
    architectures=("DeepseekV4ForCausalLM",),
    model_types=("deepseek_v4", "deepseek_v41"),
    layer_count=("num_nextn_predict_layers",),
    default_layers=None,
    head=head(),
    prefixes=("", "model."),
    fuse="sum",
    target_hidden="pre_norm",
    recycle="pre_norm",
    zero_embed_at_start=True,
    embedding="own",
    output_head="own",
    block="latent attention with one key-value head and sinks, mixture of experts, residual streams",
    ships_copies=True,
    ignored=INV_FREQ,
    foreign=(
        r"(model\.)?mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)(\..*|_.*)?",
        r"(model\.)?mtp\.\d+\.(dspark|d2t|t2d|draft_).*",
    ),
    derive=derive,
    note="Engines read the head's own copies of embedding and output head where they are there.",
    source="vllm/models/deepseek_v4/nvidia/mtp.py; sglang/srt/models/deepseek_v4_nextn.py",
)
