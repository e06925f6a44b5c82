"""Qwen3-Next and Qwen3.5 (3.6, 3.8-27B): hybrid targets with one ``mtp.`` head, dense and mixture of experts.

Differences between them: Qwen3-Next declares no layer count and stores its GDN inputs fused; Qwen3.5 nests a
``text_config``, declares ``mtp_num_hidden_layers``, and stores GDN inputs apart. All norms but the gated one of the
delta net store weights around zero. Layout: transformers ``models/qwen3_5/modeling_qwen3_5.py`` and
``models/qwen3_next/modeling_qwen3_next.py`` for the target, SGLang ``models/qwen3_5_mtp.py`` for the head.
"""

from __future__ import annotations

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec

VISION = (r"(model\.)?visual\..*", r"model\.vision_.*", r".*\.rotary_emb\.inv_freq")


def head(moe: bool) -> tuple[TensorSpec, ...]:
    """The ``mtp.`` head: fusion and end norm once, one full-attention decoder layer an index."""
    block, key = "mtp.{i}.block", "mtp.layers.{i}"
    return (
        *blocks.concat_head("mtp"),
        blocks.norm(f"{block}.input_norm", f"{key}.input_layernorm"),
        *blocks.gqa(f"{block}.attn", f"{key}.self_attn", qk_norm=True),
        blocks.norm(f"{block}.post_norm", f"{key}.post_attention_layernorm"),
        *(blocks.qwen_moe(f"{block}.moe", f"{key}.mlp") if moe else blocks.mlp(f"{block}.mlp", f"{key}.mlp")),
        blocks.tensor("mtp.0.embed.weight", "mtp.embed_tokens.weight", "vocab", "hidden", optional=True),
    )


def target(moe: bool, fused_gdn: bool) -> tuple[TensorSpec, ...]:
    """The hybrid decoder. ``full`` and ``linear`` are set a layer by the loader from ``layer_types``."""
    layer, key = "layers.{l}", "model.layers.{l}"
    sparse = blocks.qwen_moe(f"{layer}.moe", f"{key}.mlp", ("sparse_layer",))
    dense = blocks.mlp(f"{layer}.mlp", f"{key}.mlp", when=("!sparse_layer",))
    return (
        blocks.linear("embed", "model.embed_tokens", "vocab", "hidden"),
        blocks.norm(f"{layer}.input_norm", f"{key}.input_layernorm"),
        *blocks.gqa(f"{layer}.attn", f"{key}.self_attn", qk_norm=True, when=("full",)),
        *blocks.gdn(f"{layer}.gdn", f"{key}.linear_attn", fused=fused_gdn, when=("linear",)),
        blocks.norm(f"{layer}.post_norm", f"{key}.post_attention_layernorm"),
        *((*sparse, *dense) if moe else dense),
        blocks.norm("norm", "model.norm"),
        blocks.linear("head", "lm_head", "vocab", "hidden", ("!tied",)),
    )


QWEN3_NEXT = Family(
    name="qwen3_next",
    title="Qwen3-Next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    layer_count=("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    default_layers=1,
    declares_count=False,
    head=head(moe=True),
    norm="one_plus",
    constants=(("q_gate", 2), ("o_bias", 1)),
    block="gated full attention, mixture of experts with a shared expert",
    target=target(moe=True, fused_gdn=True),
    ignored=VISION,
    source="sglang/srt/models/qwen3_next_mtp.py; transformers/models/qwen3_next",
)

QWEN3_5 = Family(
    name="qwen3_5",
    title="Qwen3.5 dense",
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    model_types=("qwen3_5", "qwen3_5_text"),
    layer_count=("text_config.mtp_num_hidden_layers", "mtp_num_hidden_layers"),
    default_layers=1,
    head=head(moe=False),
    prefixes=("", "model.language_model.", "model.", "language_model."),
    norm="one_plus",
    constants=(("q_gate", 2), ("o_bias", 1)),
    block="gated full attention, dense MLP",
    target=target(moe=False, fused_gdn=False),
    target_prefixes=("model.language_model.", "model."),
    ignored=VISION,
    source="sglang/srt/models/qwen3_5_mtp.py; transformers/models/qwen3_5",
)

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    title="Qwen3.5 MoE",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    layer_count=("text_config.mtp_num_hidden_layers", "mtp_num_hidden_layers"),
    default_layers=1,
    head=head(moe=True),
    prefixes=("", "model.language_model.", "model.", "language_model."),
    norm="one_plus",
    constants=(("q_gate", 2), ("o_bias", 1)),
    block="gated full attention, mixture of experts with a shared expert",
    target=target(moe=True, fused_gdn=False),
    target_prefixes=("model.language_model.", "model."),
    ignored=VISION,
    source="sglang/srt/models/qwen3_5_mtp.py; transformers/models/qwen3_5_moe",
)
