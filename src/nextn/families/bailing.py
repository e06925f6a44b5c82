"""Ling and Ring (Bailing): DeepSeek's place and fusion, ``final_layernorm``, and exporters' own names inside the layer.

V2 has fused grouped-query attention, V2.5 and V3 latent attention, V3 with an output gate. Published checkpoints say
``attention`` and ``dense``, the engines and transformers ``self_attn`` and ``o_proj``; both are read. Layout: vLLM
``models/bailing_moe_mtp.py``, ``bailing_moe_v3_mtp.py``, SGLang ``models/bailing_moe_nextn.py``, transformers
``conversion_mapping.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import COUNT, INV_FREQ, LAYER

BLOCK = "mtp.{i}.block"


def renamed(spec: TensorSpec) -> TensorSpec:
    """The spec with the key that engines use beside the published one."""
    other = (
        spec.key.replace(".attention.dense.", ".self_attn.o_proj.")
        .replace(".attention.", ".self_attn.")
        .replace(".gate.expert_bias", ".gate.e_score_correction_bias")
    )
    return spec if other == spec.key else replace(spec, aliases=(other,))


def published(spec: TensorSpec) -> TensorSpec:
    return replace(spec, key=spec.key.replace(".attention.o_proj.", ".attention.dense."))


def head(*, latent: bool) -> tuple[TensorSpec, ...]:
    attn = f"{LAYER}.attention"
    if latent:
        attention = (
            *(published(spec) for spec in blocks.mla(f"{BLOCK}.attn", attn)),
            blocks.linear(f"{BLOCK}.attn.gate", f"{attn}.g_proj", "attn_gate", "hidden", ("attn_gate",)),
        )
    else:
        rows = "heads*head_dim+2*kv_heads*head_dim"
        attention = (
            blocks.linear(f"{BLOCK}.attn.qkv", f"{attn}.query_key_value", rows, "hidden"),
            blocks.linear(f"{BLOCK}.attn.o", f"{attn}.dense", "hidden", "heads*head_dim"),
            blocks.norm(f"{BLOCK}.attn.q_norm", f"{attn}.query_layernorm", "head_dim", ("qk_norm",)),
            blocks.norm(f"{BLOCK}.attn.k_norm", f"{attn}.key_layernorm", "head_dim", ("qk_norm",)),
        )
    specs = (
        *blocks.projected_head(LAYER, out_norm="final_layernorm"),
        *blocks.layer_norms(LAYER),
        *attention,
        *blocks.routed_moe(f"{BLOCK}.moe", f"{LAYER}.mlp", bias="gate.expert_bias"),
        *blocks.copies(LAYER),
    )
    return tuple(renamed(spec) for spec in specs)


def derive(text: Mapping[str, Any]) -> dict[str, int]:
    """Width of V3's output gate: one a head, one an element, or none."""
    granularity, heads = text.get("gated_attention_proj_granularity_type"), text.get("num_attention_heads")
    width = (
        {"head_wise": 1, "element_wise": text.get("v_head_dim")}.get(granularity, 0)
        if isinstance(granularity, str)
        else 0
    )
    if isinstance(heads, int) and isinstance(width, int):
        return {"attn_gate": heads * width}
    return {}


BAILING_HYBRID = Family(
    name="bailing_hybrid",
    title="Ling 2.5 / 3",
    architectures=("BailingHybridForCausalLM", "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM"),
    model_types=("bailing_hybrid", "bailing_moe_v2_5", "bailing_moe_v3"),
    layer_count=COUNT,
    default_layers=None,
    head=head(latent=True),
    zero_embed_at_start=True,
    block="latent attention, mixture of experts with a shared expert",
    ignored=INV_FREQ,
    derive=derive,
    source="vllm/model_executor/models/bailing_moe_mtp.py, bailing_moe_v3.py; transformers/conversion_mapping.py",
)

BAILING_MOE_V2 = Family(
    name="bailing_moe_v2",
    title="Ling 2",
    architectures=("BailingMoeV2ForCausalLM", "BailingMoeForCausalLM"),
    model_types=("bailing_moe_v2", "bailing_moe"),
    layer_count=COUNT,
    default_layers=None,
    head=head(latent=False),
    block="full attention with fused q, k, v, mixture of experts with a shared expert",
    ignored=INV_FREQ,
    source="sglang/srt/models/bailing_moe_nextn.py, bailing_moe.py",
)
