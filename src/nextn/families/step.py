"""Step-3.5-Flash and Step-3.7-Flash: three chained heads, each with an output head of its own.

Some keys sit under a ``.transformer.`` infix. Attention has a gate a head and may have another head count where the
layer is sliding; which it is, the entries of ``layer_types`` past num_hidden_layers say. Layout: SGLang
``models/step3p5_mtp.py``, vLLM ``models/step3p5.py``, ``step3p5_mtp.py``, transformers ``models/step3p7``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import INV_FREQ, LAYER, NESTED_COUNT

PADDED = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")
"""Lists that SGLang's ``step3p5.py`` indexes with the number of a head layer too."""
BLOCK, INFIX = "mtp.{i}.block", f"{LAYER}.transformer"


def head() -> tuple[TensorSpec, ...]:
    attn, moe = f"{LAYER}.self_attn", f"{LAYER}.moe"
    sparse = ("mtp_moe",)
    plain = (
        *blocks.projected_head(LAYER)[:3],
        *blocks.layer_norms(LAYER),
        *blocks.gqa(f"{BLOCK}.attn", attn, qk_norm=True, sizes="mtp_"),
        blocks.linear(f"{BLOCK}.attn.gate", f"{attn}.g_proj", "mtp_heads", "hidden", ("head_gate",)),
        *blocks.mlp(f"{BLOCK}.mlp", f"{LAYER}.mlp", when=("!mtp_moe",)),
        blocks.linear(f"{BLOCK}.moe.router", f"{moe}.gate", "experts", "hidden", sparse),
        blocks.tensor(f"{BLOCK}.moe.router_bias", f"{moe}.router_bias", "experts", when=sparse),
        blocks.tensor(
            f"{BLOCK}.moe.experts.gate", f"{moe}.gate_proj.weight", "experts", "moe_inter", "hidden", when=sparse
        ),
        blocks.tensor(
            f"{BLOCK}.moe.experts.up", f"{moe}.up_proj.weight", "experts", "moe_inter", "hidden", when=sparse
        ),
        blocks.tensor(
            f"{BLOCK}.moe.experts.down", f"{moe}.down_proj.weight", "experts", "hidden", "moe_inter", when=sparse
        ),
        *blocks.mlp(f"{BLOCK}.moe.shared", f"{LAYER}.share_expert", "shared_inter", sparse),
    )
    return (
        *(replace(spec, aliases=(spec.key.replace(LAYER, INFIX, 1),)) for spec in plain),
        replace(
            blocks.norm("mtp.{i}.out_norm", f"{INFIX}.shared_head.norm"), aliases=(f"{LAYER}.shared_head.norm.weight",)
        ),
        replace(
            blocks.linear("mtp.{i}.head", f"{INFIX}.shared_head.output", "vocab", "hidden"),
            aliases=(
                f"{LAYER}.shared_head.output.weight",
                f"{LAYER}.shared_head.head.weight",
                f"{INFIX}.shared_head.head.weight",
            ),
        ),
        replace(
            blocks.tensor("mtp.{i}.embed.weight", f"{LAYER}.embed_tokens.weight", "vocab", "hidden", optional=True),
            aliases=(f"{INFIX}.embed_tokens.weight", f"{INFIX}.tok_embeddings.weight"),
        ),
    )


def derive(text: Mapping[str, Any]) -> dict[str, int]:
    """Head count and kind of the first layer after the target's; odd values are left to the plain geometry."""
    layers = text.get("num_hidden_layers")
    layers = layers if isinstance(layers, int) and not isinstance(layers, bool) else -1
    listed = text.get("layer_types")
    kinds = text.get("mtp_layer_types") or (listed[layers : layers + 1] if isinstance(listed, list) else [])
    other = text.get("attention_other_setting")
    other = other if isinstance(other, Mapping) else {}
    sliding = isinstance(kinds, list) and kinds[:1] == ["sliding_attention"]
    flags = {"head_gate": int(bool(text.get("use_head_wise_attn_gate", False))), "mtp_moe": int(_sparse(text, layers))}
    heads = text.get("num_attention_heads")
    kv_heads = text.get("num_attention_groups", text.get("num_key_value_heads", heads))
    head_dim = text.get("head_dim")
    if sliding:
        heads = other.get("num_attention_heads", text.get("num_sliding_attention_heads", heads))
        kv_heads = other.get("num_attention_groups", kv_heads)
        head_dim = other.get("head_dim", head_dim)
    hidden = text.get("hidden_size")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    for name, value in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim), ("v_head_dim", head_dim)):
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            flags[f"mtp_{name}"] = value
    return flags


def _sparse(text: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer index is among those that have experts."""
    kinds = text.get("mtp_mlp_layer_types")
    if isinstance(kinds, list):
        return kinds[:1] == ["sparse"]
    listed = text.get("moe_layers_enum")
    items = listed.split(",") if isinstance(listed, str) else listed if isinstance(listed, list) else []
    return str(layer) in {str(item).strip() for item in items}


def family(name: str, title: str, architecture: str, model_types: tuple[str, ...]) -> Family:
    return Family(
        name=name,
        title=title,
        architectures=(architecture,),
        model_types=model_types,
        layer_count=NESTED_COUNT,
        default_layers=3,
        padded_lists=PADDED,
        head=head(),
        prefixes=("", "model.language_model.", "language_model."),
        norm="one_plus",
        target_hidden="pre_norm",
        recycle="pre_norm",
        physical_layers="chain",
        output_head="own",
        block="full or sliding-window attention with a gate a head, dense MLP",
        ignored=(*INV_FREQ, r"(model\.)?vision_model\..*", r"vit_.*"),
        derive=derive,
        note="Shapes of attention are those of the first head's layer type; the loaders read the target's embedding.",
        source="sglang/srt/models/step3p5_mtp.py; vllm/model_executor/models/step3p5_mtp.py",
    )


STEP3P5 = family("step3p5", "Step-3.5-Flash", "Step3p5ForCausalLM", ("step3p5",))
STEP3P7 = family("step3p7", "Step-3.7-Flash", "Step3p7ForConditionalGeneration", ("step3p7",))
