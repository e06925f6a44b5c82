"""MiniMax-M2 and M3: heads under ``model.mtp.layers.``, a sparse layer nested as ``transformer_layer``.

M3 declares seven modules and one next-n layer; its engine counts the modules. Its attention carries an indexer. No
loader of M2's head is public: its rows follow M3's place and M2's own decoder layer, and are marked as an inference.
Layout: vLLM ``models/minimax_m3/nvidia/mtp.py``, transformers ``models/minimax_m3_vl``, ``models/minimax_m2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import INV_FREQ

BLOCK, LAYER = "mtp.{i}.block", "model.mtp.layers.{i}"
INNER = f"{LAYER}.transformer_layer"
PREFIXES = ("", "language_model.", "model.language_model.")


def moe(shared: bool) -> tuple[TensorSpec, ...]:
    name, key = f"{BLOCK}.moe", f"{INNER}.block_sparse_moe"
    routed = (
        blocks.linear(f"{name}.router", f"{key}.gate", "experts", "hidden"),
        blocks.tensor(f"{name}.router_bias", f"{key}.e_score_correction_bias", "experts", when=("routing_bias",)),
        *blocks.named_experts(f"{name}.experts", f"{key}.experts", "w1", "w3", "w2", inter="inter"),
    )
    if not shared:
        return routed
    return (*routed, *blocks.mlp(f"{name}.shared", f"{key}.shared_experts", "mtp_shared", ("mtp_shared",)))


def m3_head() -> tuple[TensorSpec, ...]:
    attn, index = f"{INNER}.self_attn", f"{BLOCK}.attn.index"
    return (
        *blocks.projected_head(LAYER, out_norm="final_layernorm"),
        *blocks.layer_norms(INNER),
        *blocks.gqa(f"{BLOCK}.attn", attn, qk_norm=True),
        blocks.linear(f"{index}.q", f"{attn}.index_q_proj", "mtp_index_heads*mtp_index_dim", "hidden"),
        blocks.linear(f"{index}.k", f"{attn}.index_k_proj", "mtp_index_dim", "hidden"),
        blocks.norm(f"{index}.q_norm", f"{attn}.index_q_norm", "mtp_index_dim"),
        blocks.norm(f"{index}.k_norm", f"{attn}.index_k_norm", "mtp_index_dim"),
        *moe(shared=True),
    )


def m2_head() -> tuple[TensorSpec, ...]:
    attn = f"{INNER}.self_attn"
    return (
        *blocks.projected_head(LAYER, out_norm="final_layernorm"),
        *blocks.layer_norms(INNER),
        *blocks.gqa(f"{BLOCK}.attn", attn),
        blocks.norm(f"{BLOCK}.attn.q_norm", f"{attn}.q_norm", "heads*head_dim"),
        blocks.norm(f"{BLOCK}.attn.k_norm", f"{attn}.k_norm", "kv_heads*head_dim"),
        *moe(shared=False),
    )


def derive(text: Mapping[str, Any]) -> dict[str, int]:
    """Router bias, width of the shared experts, and the indexer's sizes from either spelling."""
    flags = {"routing_bias": int(bool(text.get("use_routing_bias", False)))}
    inter, shared = text.get("intermediate_size"), text.get("n_shared_experts")
    if isinstance(inter, int) and isinstance(shared, int):
        flags["mtp_shared"] = inter * shared
    sparse = text.get("sparse_attention_config")
    sparse = sparse if isinstance(sparse, Mapping) else {}
    for name, flat, nested, usual in (
        ("heads", "index_n_heads", "sparse_num_index_heads", 4),
        ("dim", "index_head_dim", "sparse_index_dim", 128),
    ):
        value = sparse.get(nested, text.get(flat, usual))
        flags[f"mtp_index_{name}"] = value if isinstance(value, int) and value > 0 else usual
    return flags


MINIMAX_M3 = Family(
    name="minimax_m3_vl",
    title="MiniMax-M3",
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForCausalLM"),
    model_types=("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3"),
    layer_count=("text_config.num_mtp_modules", "num_mtp_modules", "text_config.num_nextn_predict_layers"),
    default_layers=None,
    head=m3_head(),
    prefixes=PREFIXES,
    norm="one_plus",
    recycle="pre_norm",
    zero_embed_at_start=True,
    physical_layers="chain",
    block="sparse attention with an indexer, mixture of experts with a shared expert",
    ignored=(*INV_FREQ, r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*", r"patch_merge_mlp\..*"),
    derive=derive,
    note="The config declares both num_mtp_modules (7) and num_nextn_predict_layers (1); vLLM reads the first.",
    source="vllm/models/minimax_m3/nvidia/mtp.py; transformers/models/minimax_m3_vl",
)

MINIMAX_M2 = Family(
    name="minimax_m2",
    title="MiniMax-M2",
    architectures=("MiniMaxM2ForCausalLM",),
    model_types=("minimax_m2",),
    layer_count=("num_mtp_modules",),
    default_layers=None,
    head=m2_head(),
    prefixes=PREFIXES,
    block="full attention, mixture of experts",
    ignored=INV_FREQ,
    derive=derive,
    confidence="partial",
    note="No engine loads this head and no public checkpoint pins its keys; the config declares three modules.",
    source="transformers/models/minimax_m2 for the layer; place as in MiniMax-M3",
)
