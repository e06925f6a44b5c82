"""Tencent Hunyuan V3 and V4.

V3 keeps the head after the target's layers with grouped-query attention and its own router names; V4 under
``model.mtp_layers.`` with gated latent attention, sinks and an indexer, and without the target's residual streams.
Layout: SGLang ``models/hunyuan_v3_nextn.py``, ``hunyuan_v4_nextn.py``, vLLM ``models/hy_v4/nvidia/mtp.py``,
transformers ``conversion_mapping.py``.
"""

from __future__ import annotations

from dataclasses import replace

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import COUNT, INV_FREQ, LAYER

BLOCK, V4_LAYER = "mtp.{i}.block", "model.mtp_layers.{i}"


def v3_head() -> tuple[TensorSpec, ...]:
    moe, mlp = f"{BLOCK}.moe", f"{LAYER}.mlp"
    return (
        *blocks.projected_head(LAYER, out_norm="final_layernorm"),
        *blocks.layer_norms(LAYER),
        *blocks.gqa(f"{BLOCK}.attn", f"{LAYER}.self_attn", qk_norm="qk_norm"),
        replace(
            blocks.linear(f"{moe}.router", f"{mlp}.router.gate", "experts", "hidden"), aliases=(f"{mlp}.gate.weight",)
        ),
        blocks.tensor(f"{moe}.router_bias", f"{mlp}.expert_bias", "experts"),
        *blocks.experts(f"{moe}.experts", f"{mlp}.experts"),
        *(
            replace(spec, aliases=(spec.key.replace(".shared_mlp.", ".shared_experts."),))
            for spec in blocks.mlp(f"{moe}.shared", f"{mlp}.shared_mlp", "shared_inter", ("shared_inter",))
        ),
        *blocks.copies(LAYER),
    )


def v4_head() -> tuple[TensorSpec, ...]:
    attn = f"{V4_LAYER}.self_attn"
    return (
        *blocks.projected_head(V4_LAYER, out_norm="final_layernorm"),
        *blocks.layer_norms(V4_LAYER),
        *blocks.mla(f"{BLOCK}.attn", attn, indexer=True),
        blocks.linear(f"{BLOCK}.attn.gate", f"{attn}.linear_gate", "heads*v_head_dim", "hidden"),
        blocks.tensor(f"{BLOCK}.attn.sink", f"{attn}.learnable_sink_param", "heads"),
        *blocks.routed_moe(f"{BLOCK}.moe", f"{V4_LAYER}.mlp"),
    )


HY_V3 = Family(
    name="hy_v3",
    title="Hunyuan V3",
    architectures=("HYV3ForCausalLM",),
    model_types=("hy_v3",),
    layer_count=COUNT,
    default_layers=None,
    head=v3_head(),
    zero_embed_at_start=True,
    block="full attention, mixture of experts with a shared expert",
    ships_copies=True,
    ignored=INV_FREQ,
    source="sglang/srt/models/hunyuan_v3_nextn.py; transformers/conversion_mapping.py",
)

HY_V4 = Family(
    name="hy_v4",
    title="Hunyuan V4",
    architectures=("HYV4ForCausalLM",),
    model_types=("hy_v4", "hy_v4_vl", "hy_v4_vl_text"),
    layer_count=COUNT,
    default_layers=None,
    spare_layers=1,
    head=v4_head(),
    prefixes=("", "model.language_model."),
    zero_embed_at_start=True,
    block="gated latent attention with sinks and an indexer, mixture of experts with a shared expert",
    ignored=(*INV_FREQ, r"(model\.)?(vit|vision_tower)\..*"),
    note="Checkpoints may declare 2 and hold one head: vLLM counts one less than declared, at least one.",
    source="sglang/srt/models/hunyuan_v4_nextn.py; vllm/models/hy_v4/nvidia/mtp.py",
)
