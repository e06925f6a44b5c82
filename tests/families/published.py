"""Configs of published checkpoints, cut down to the fields that geometry reads, and how many tensors their heads have.

The count is written as a sum of parts that can be checked by eye against the loader named in the family's `source`;
copies of shared tensors are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FUSION, NORMS = 4, 2
"""Two norms, the projection and the end norm; the two norms of a decoder layer."""
GQA, QK_NORM, QKV_BIAS, MLP = 4, 2, 3, 3
MLA, INDEXER = 7, 5
ROUTER, SHARED = 2, 3


@dataclass(frozen=True)
class Published:
    family: str
    config: dict[str, Any]
    heads: int
    tensors: int
    grouped: int | None = None
    declared_by: str | None = "num_nextn_predict_layers"


def qwen(**more: Any) -> dict[str, Any]:
    text = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320} | more
    return {"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1} | text}


QWEN_DENSE = FUSION + NORMS + GQA + QK_NORM + MLP
QWEN_MOE = FUSION + NORMS + GQA + QK_NORM + 1 + 1 + SHARED

DEEPSEEK = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "num_nextn_predict_layers": 1,
}
SPARSE = ROUTER + SHARED + 3 * 256

GLM = {
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
    "vocab_size": 151552,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}

MIMO_V2 = {
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "intermediate_size": 16384,
    "vocab_size": 152576,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "add_swa_attention_sink_bias": True,
}

STEP = {
    "hidden_size": 4096,
    "num_hidden_layers": 45,
    "intermediate_size": 11264,
    "vocab_size": 128896,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
    "layer_types": ["full_attention"] * 45 + ["sliding_attention"] * 3,
    "moe_layers_enum": ",".join(str(i) for i in range(3, 45)),
    "moe_num_experts": 288,
    "use_head_wise_attn_gate": True,
    "num_nextn_predict_layers": 3,
}

MINIMAX = {
    "hidden_size": 3072,
    "num_hidden_layers": 62,
    "intermediate_size": 1536,
    "vocab_size": 200064,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "use_routing_bias": True,
}

BAILING = {
    "hidden_size": 2560,
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 157184,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 512,
    "num_shared_experts": 1,
    "moe_intermediate_size": 768,
    "num_nextn_predict_layers": 1,
}

PUBLISHED: dict[str, Published] = {
    "Qwen3.5-27B": Published(
        "qwen3_5",
        qwen(hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24),
        1,
        QWEN_DENSE,
        declared_by="text_config.mtp_num_hidden_layers",
    ),
    "Qwen3.5-397B": Published(
        "qwen3_5_moe",
        {
            "model_type": "qwen3_5_moe",
            "text_config": qwen(
                hidden_size=4096,
                num_hidden_layers=60,
                num_experts=512,
                moe_intermediate_size=1024,
                shared_expert_intermediate_size=1024,
            )["text_config"],
        },
        1,
        QWEN_MOE + 3 * 512,
        QWEN_MOE + 2,
        declared_by="text_config.mtp_num_hidden_layers",
    ),
    "Qwen3-Next-80B": Published(
        "qwen3_next",
        {
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 512,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 151936,
        },
        1,
        QWEN_MOE + 3 * 512,
        QWEN_MOE + 2,
        declared_by=None,
    ),
    "Qwen3.8-Flash-Next": Published(
        "qwen4_exp",
        {
            "model_type": "qwen4_exp",
            "text_config": {
                "hidden_size": 2048,
                "num_hidden_layers": 40,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "hc_count": 4,
                "hc_lowrank": 320,
                "indexer_n_heads": 4,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 128,
                "num_experts": 512,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "vocab_size": 248320,
                "mtp_num_hidden_layers": 1,
            },
        },
        1,
        FUSION + 3 + 2 * 4 + GQA + QK_NORM + 3 + 1 + 1 + SHARED + 3 * 512,
        FUSION + 3 + 2 * 4 + GQA + QK_NORM + 3 + 1 + 1 + SHARED + 2,
        declared_by="text_config.mtp_num_hidden_layers",
    ),
    "EXAONE-MoE": Published(
        "exaone_moe",
        {
            "model_type": "exaone_moe",
            "hidden_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 18432,
            "num_experts": 128,
            "vocab_size": 153600,
            "num_nextn_predict_layers": 1,
        },
        1,
        QWEN_DENSE,
    ),
    "EXAONE-4.5": Published(
        "exaone4_5",
        {
            "model_type": "exaone4_5",
            "num_nextn_predict_layers": 1,
            "text_config": {
                "hidden_size": 5120,
                "num_hidden_layers": 64,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 27392,
                "vocab_size": 153600,
            },
        },
        1,
        QWEN_DENSE,
    ),
    "DeepSeek-V3": Published(
        "deepseek_v3",
        DEEPSEEK | {"model_type": "deepseek_v3"},
        1,
        FUSION + NORMS + MLA + SPARSE,
        FUSION + NORMS + MLA + ROUTER + SHARED + 2,
    ),
    "DeepSeek-V3.2": Published(
        "deepseek_v3",
        DEEPSEEK | {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128},
        1,
        FUSION + NORMS + MLA + INDEXER + SPARSE,
    ),
    "DeepSeek-V4-Flash": Published(
        "deepseek_v4",
        {
            "model_type": "deepseek_v4",
            "hidden_size": 4096,
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "q_lora_rank": 1024,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "hc_mult": 4,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "vocab_size": 129280,
            "num_nextn_predict_layers": 1,
        },
        1,
        5 + 3 + NORMS + 2 * 3 + 8 + SPARSE,
    ),
    "GLM-4.6": Published(
        "glm4_moe",
        GLM | {"model_type": "glm4_moe"},
        1,
        FUSION + NORMS + GQA + QKV_BIAS + QK_NORM + ROUTER + SHARED + 3 * 160,
    ),
    "GLM-4.5-Air": Published(
        "glm4_moe",
        GLM | {"model_type": "glm4_moe", "use_qk_norm": False, "num_hidden_layers": 46, "n_routed_experts": 128},
        1,
        FUSION + NORMS + GQA + QKV_BIAS + ROUTER + SHARED + 3 * 128,
    ),
    "GLM-4.7-Flash": Published(
        "glm4_moe_lite",
        DEEPSEEK | {"model_type": "glm4_moe_lite", "n_routed_experts": 64, "num_hidden_layers": 47},
        1,
        FUSION + NORMS + MLA + ROUTER + SHARED + 3 * 64,
    ),
    "GLM-5.2": Published(
        "glm_moe_dsa",
        DEEPSEEK | {"model_type": "glm_moe_dsa", "num_hidden_layers": 78, "index_n_heads": 32, "index_head_dim": 128},
        1,
        791,
    ),
    "GLM-5.3-Flash": Published(
        "glm5_next",
        {
            "model_type": "glm5_next",
            "text_config": DEEPSEEK
            | {
                "num_hidden_layers": 45,
                "n_routed_experts": 288,
                "index_n_heads": 32,
                "index_head_dim": 128,
                "index_kpool": 16,
            },
        },
        1,
        FUSION + NORMS + MLA + INDEXER + 2 + ROUTER + SHARED + 3 * 288,
        declared_by="text_config.num_nextn_predict_layers",
    ),
    "GLM-OCR": Published(
        "glm_ocr",
        {
            "model_type": "glm_ocr",
            "text_config": {
                "hidden_size": 1536,
                "num_hidden_layers": 16,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 4608,
                "vocab_size": 59392,
                "num_nextn_predict_layers": 1,
            },
        },
        1,
        FUSION + 2 * NORMS + GQA + 2,
        declared_by="text_config.num_nextn_predict_layers",
    ),
    "MiMo-7B": Published(
        "mimo",
        {
            "model_type": "mimo",
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 11008,
            "vocab_size": 151680,
            "num_nextn_predict_layers": 1,
        },
        1,
        FUSION + NORMS + GQA + QKV_BIAS + MLP,
    ),
    "MiMo-V2-Flash": Published(
        "mimo_v2_flash",
        MIMO_V2 | {"model_type": "mimo_v2_flash"},
        3,
        3 * (FUSION + NORMS + GQA + 1 + MLP),
        declared_by=None,
    ),
    "MiMo-V2.5": Published(
        "mimo_v2", MIMO_V2 | {"model_type": "mimo_v2"}, 3, 3 * (FUSION + NORMS + 2 + 1 + MLP), declared_by=None
    ),
    "Nemotron-3.5-Lightning-30B": Published(
        "nemotron_h",
        {
            "model_type": "nemotron_h",
            "hidden_size": 2688,
            "num_hidden_layers": 52,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "vocab_size": 131072,
            "mtp_hybrid_override_pattern": "*E",
            "num_nextn_predict_layers": 1,
        },
        1,
        270,
    ),
    "Step-3.5-Flash": Published(
        "step3p5", STEP | {"model_type": "step3p5"}, 3, 3 * (FUSION + 1 + NORMS + GQA + QK_NORM + 1 + MLP)
    ),
    "Step-3.7-Flash": Published(
        "step3p7",
        {"model_type": "step3p7", "text_config": STEP | {"model_type": "step3p5"}},
        3,
        3 * (FUSION + 1 + NORMS + GQA + QK_NORM + 1 + MLP),
        declared_by="text_config.num_nextn_predict_layers",
    ),
    "ERNIE-4.5-21B": Published(
        "ernie4_5_moe",
        {
            "model_type": "ernie4_5_moe",
            "hidden_size": 2560,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12288,
            "moe_num_experts": 64,
            "vocab_size": 103424,
            "num_nextn_predict_layers": 1,
        },
        1,
        3 + NORMS + GQA + MLP,
    ),
    "LongCat-Flash": Published(
        "longcat_flash",
        {
            "model_type": "longcat_flash",
            "hidden_size": 6144,
            "num_layers": 28,
            "num_attention_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "ffn_hidden_size": 12288,
            "n_routed_experts": 512,
            "vocab_size": 131072,
        },
        1,
        FUSION + NORMS + MLA + MLP,
        declared_by=None,
    ),
    "Ling-2.5": Published(
        "bailing_hybrid",
        BAILING | {"model_type": "bailing_hybrid"},
        1,
        FUSION + NORMS + (MLA - 2) + ROUTER + SHARED + 3 * 512,
    ),
    "Ling-3": Published(
        "bailing_hybrid",
        BAILING | {"model_type": "bailing_moe_v3", "gated_attention_proj_granularity_type": "head_wise"},
        1,
        FUSION + NORMS + (MLA - 2) + 1 + ROUTER + SHARED + 3 * 512,
    ),
    "Ling-2": Published(
        "bailing_moe_v2",
        BAILING | {"model_type": "bailing_moe_v2", "num_key_value_heads": 8, "use_qk_norm": True, "num_experts": 256},
        1,
        FUSION + NORMS + 2 + QK_NORM + ROUTER + SHARED + 3 * 256,
    ),
    "Hunyuan-V3": Published(
        "hy_v3",
        {
            "model_type": "hy_v3",
            "hidden_size": 4096,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 192,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "qk_norm": True,
            "vocab_size": 120832,
            "num_nextn_predict_layers": 1,
        },
        1,
        FUSION + NORMS + GQA + QK_NORM + ROUTER + SHARED + 3 * 192,
    ),
    "Hunyuan-V4": Published(
        "hy_v4",
        DEEPSEEK | {"model_type": "hy_v4", "num_hidden_layers": 34, "index_n_heads": 16, "index_head_dim": 128},
        1,
        FUSION + NORMS + MLA + INDEXER + 2 + SPARSE,
    ),
    "MiniMax-M2": Published(
        "minimax_m2",
        MINIMAX | {"model_type": "minimax_m2", "use_mtp": True, "num_mtp_modules": 3},
        3,
        3 * (FUSION + NORMS + GQA + QK_NORM + ROUTER + 3 * 256),
        declared_by="num_mtp_modules",
    ),
    "MiniMax-M3": Published(
        "minimax_m3_vl",
        {
            "model_type": "minimax_m3_vl",
            "text_config": MINIMAX
            | {
                "num_mtp_modules": 7,
                "num_nextn_predict_layers": 1,
                "n_shared_experts": 1,
                "sparse_attention_config": {"sparse_num_index_heads": 4, "sparse_index_dim": 128},
            },
        },
        7,
        7 * (FUSION + NORMS + GQA + QK_NORM + 4 + ROUTER + SHARED + 3 * 256),
        declared_by="text_config.num_mtp_modules",
    ),
    "Kimi-K3": Published(
        "kimi_k3",
        {
            "model_type": "kimi_k3",
            "text_config": DEEPSEEK
            | {
                "model_type": "kimi_linear",
                "num_hidden_layers": 93,
                "mla_use_output_gate": True,
                "routed_expert_hidden_size": 3584,
                "latent_moe_use_norm": True,
            },
        },
        1,
        FUSION + 1 + NORMS + MLA + 1 + ROUTER + SHARED + 3 + 3 * 256,
        declared_by="text_config.num_nextn_predict_layers",
    ),
    "Inkling": Published(
        "inkling",
        {
            "model_type": "inkling_mm_model",
            "mtp_config": {"num_nextn_predict_layers": 4},
            "text_config": {"hidden_size": 6144, "num_hidden_layers": 66, "vocab_size": 200064},
        },
        4,
        1 + 4 * (3 + NORMS + 5 + QK_NORM + 1 + 4 + 3),
        declared_by="mtp_config.num_nextn_predict_layers",
    ),
}
"""Name of a checkpoint -> its config and its head's tensors."""
