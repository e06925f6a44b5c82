"""Kimi-K3: DeepSeek's layout with an output head of its own and experts on a latent state.

Text weights sit under ``language_model.``. Attention is latent with an output gate; the block starts without the
target's attention residuals. vLLM recycles the state before the end norm. Layout: vLLM
``models/kimi_k3/nvidia/mtp.py``, ``model.py``, ``mla.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import INV_FREQ, LAYER, NESTED_COUNT

BLOCK = "mtp.{i}.block"


def head() -> tuple[TensorSpec, ...]:
    attn, moe, name = f"{LAYER}.self_attn", f"{LAYER}.block_sparse_moe", f"{BLOCK}.moe"
    return (
        *blocks.projected_head(LAYER),
        blocks.linear("mtp.{i}.head", f"{LAYER}.shared_head.head", "vocab", "hidden"),
        blocks.tensor("mtp.{i}.embed.weight", f"{LAYER}.embed_tokens.weight", "vocab", "hidden", optional=True),
        *blocks.layer_norms(LAYER),
        *blocks.mla(f"{BLOCK}.attn", attn),
        blocks.linear(f"{BLOCK}.attn.gate", f"{attn}.g_proj", "heads*v_head_dim", "hidden", ("output_gate",)),
        blocks.linear(f"{name}.router", f"{moe}.gate", "experts", "hidden"),
        blocks.tensor(f"{name}.router_bias", f"{moe}.gate.e_score_correction_bias", "experts"),
        *blocks.named_experts(f"{name}.experts", f"{moe}.experts", "w1", "w3", "w2", into="expert_in"),
        *blocks.mlp(f"{name}.shared", f"{moe}.shared_experts", "shared_inter", ("shared_inter",)),
        blocks.linear(f"{name}.latent_in", f"{moe}.routed_expert_down_proj", "latent", "hidden", ("latent",)),
        blocks.norm(f"{name}.latent_norm", f"{moe}.routed_expert_norm", "latent", ("latent", "latent_norm")),
        blocks.linear(f"{name}.latent_out", f"{moe}.routed_expert_up_proj", "hidden", "latent", ("latent",)),
    )


def derive(text: Mapping[str, Any]) -> dict[str, int]:
    flags = {
        "output_gate": int(bool(text.get("mla_use_output_gate", False))),
        "latent_norm": int(bool(text.get("latent_moe_use_norm", False))),
    }
    width = text.get("routed_expert_hidden_size") or text.get("hidden_size")
    if isinstance(width, int) and not isinstance(width, bool) and width > 0:
        flags["expert_in"] = width
    return flags


KIMI_K3 = Family(
    name="kimi_k3",
    title="Kimi-K3",
    architectures=("KimiK3ForConditionalGeneration",),
    model_types=("kimi_k3",),
    layer_count=NESTED_COUNT,
    default_layers=None,
    head=head(),
    prefixes=("", "language_model."),
    recycle="pre_norm",
    zero_embed_at_start=True,
    output_head="own",
    block="gated latent attention, mixture of experts on a latent state",
    ignored=(*INV_FREQ, r"vision_tower\..*", r"mm_projector\..*"),
    derive=derive,
    confidence="partial",
    note="Read from one loader; no published listing was compared.",
    source="vllm/models/kimi_k3/nvidia/mtp.py, model.py, mla.py",
)
