"""GLM-4.5 to GLM-5.3 and GLM-OCR: DeepSeek's layout with GLM's own decoder layers.

GLM-4.5, 4.6 and 4.7 repeat grouped-query attention with biases and routed experts; 4.7-Flash and GLM-5 latent
attention, GLM-5 with the indexer; GLM-OCR a dense layer with four norms and a fused gate and up projection.
4.5 ships copies of embedding and output head, 4.6 does not. Layout: SGLang ``models/glm4_moe_nextn.py``,
``glm5_next_nextn.py``, vLLM ``models/glm4_moe_mtp.py``, ``glm_ocr_mtp.py``, transformers ``models/glm_ocr``.
"""

from __future__ import annotations

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import COUNT, INV_FREQ, LAYER, NESTED_COUNT
from nextn.families.deepseek import head as deepseek_head

BLOCK = "mtp.{i}.block"
NESTED = ("", "model.language_model.")
VISION = (*INV_FREQ, r"(model\.)?visual\..*", r"model\.vision_.*")


def moe_head() -> tuple[TensorSpec, ...]:
    return (
        *blocks.projected_head(LAYER),
        *blocks.layer_norms(LAYER),
        *blocks.gqa(f"{BLOCK}.attn", f"{LAYER}.self_attn", qk_norm="qk_norm"),
        *blocks.routed_moe(f"{BLOCK}.moe", f"{LAYER}.mlp"),
        *blocks.copies(LAYER),
    )


def ocr_head() -> tuple[TensorSpec, ...]:
    return (
        *blocks.projected_head(LAYER),
        *blocks.layer_norms(LAYER),
        blocks.norm(f"{BLOCK}.post_attn_norm", f"{LAYER}.post_self_attn_layernorm"),
        blocks.norm(f"{BLOCK}.post_mlp_norm", f"{LAYER}.post_mlp_layernorm"),
        *blocks.gqa(f"{BLOCK}.attn", f"{LAYER}.self_attn"),
        blocks.linear(f"{BLOCK}.mlp.gate_up", f"{LAYER}.mlp.gate_up_proj", "2*inter", "hidden"),
        blocks.linear(f"{BLOCK}.mlp.down", f"{LAYER}.mlp.down_proj", "hidden", "inter"),
        *blocks.copies(LAYER),
    )


def pooled_head() -> tuple[TensorSpec, ...]:
    """GLM-5.3-Flash: the indexer pools keys, with two tensors more; the target's residual streams are left out."""
    index = f"{LAYER}.self_attn.indexer"
    pooled = ("index_heads", "index_pool")
    return (
        *deepseek_head(),
        blocks.tensor(
            f"{BLOCK}.attn.index.pool_ape",
            f"{index}.index_kpool_compress_ape",
            "index_pool",
            "index_dim",
            when=pooled,
        ),
        blocks.tensor(
            f"{BLOCK}.attn.index.pool_gate",
            f"{index}.index_kpool_compress_gate",
            "index_dim",
            "hidden",
            when=pooled,
        ),
    )


GLM4_MOE = Family(
    name="glm4_moe",
    title="GLM-4.5 / 4.6 / 4.7",
    architectures=("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration"),
    model_types=("glm4_moe", "glm4v_moe", "glm4v_moe_text"),
    layer_count=NESTED_COUNT,
    default_layers=None,
    head=moe_head(),
    prefixes=NESTED,
    zero_embed_at_start=True,
    block="full attention with biases, mixture of experts with a shared expert",
    ships_copies=True,
    ignored=VISION,
    note="vLLM recycles the state before the end norm, SGLang the one after it.",
    source="sglang/srt/models/glm4_moe_nextn.py; vllm/model_executor/models/glm4_moe_mtp.py",
)

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    title="GLM-4.7-Flash",
    architectures=("Glm4MoeLiteForCausalLM",),
    model_types=("glm4_moe_lite",),
    layer_count=COUNT,
    default_layers=None,
    head=deepseek_head(indexer=False),
    zero_embed_at_start=True,
    block="latent attention, mixture of experts with a shared expert",
    ships_copies=True,
    ignored=INV_FREQ,
    source="sglang/srt/models/glm4_moe_lite_nextn.py; vllm/model_executor/models/glm4_moe_lite_mtp.py",
)

GLM_MOE_DSA = Family(
    name="glm_moe_dsa",
    title="GLM-5",
    architectures=("GlmMoeDsaForCausalLM",),
    model_types=("glm_moe_dsa",),
    layer_count=COUNT,
    default_layers=None,
    head=deepseek_head(),
    zero_embed_at_start=True,
    block="latent attention with an indexer, mixture of experts with a shared expert",
    ships_copies=True,
    ignored=INV_FREQ,
    source="sglang/srt/models/deepseek_nextn.py; vllm/models/deepseek_v32",
)

GLM5_NEXT = Family(
    name="glm5_next",
    title="GLM-5.3-Flash",
    architectures=("Glm5NextForConditionalGeneration",),
    model_types=("glm5_next", "glm5_next_text"),
    layer_count=NESTED_COUNT,
    default_layers=None,
    head=pooled_head(),
    prefixes=NESTED,
    zero_embed_at_start=True,
    block="latent attention with a pooling indexer, mixture of experts with a shared expert",
    ships_copies=True,
    ignored=VISION,
    source="vllm/models/glm5next/common/mtp.py; sglang/srt/layers/attention/dsa/dsa_indexer_kpool.py",
)

GLM_OCR = Family(
    name="glm_ocr",
    title="GLM-OCR",
    architectures=("GlmOcrForConditionalGeneration",),
    model_types=("glm_ocr", "glm_ocr_text"),
    layer_count=NESTED_COUNT,
    default_layers=None,
    head=ocr_head(),
    prefixes=NESTED,
    zero_embed_at_start=True,
    block="full attention, dense MLP with fused gate and up, four norms",
    ships_copies=True,
    ignored=VISION,
    source="vllm/model_executor/models/glm_ocr_mtp.py; transformers/models/glm_ocr",
)
