"""Inkling: several chained heads of a layer with short convolutions, hidden state first in the fusion.

Each depth may be full or sliding-window attention with head counts of its own (``mtp_config.local_layer_ids``), so
sizes that depend on it are not pinned here. The embedding passes the target's own embedding norm before the head's.
One ``chain_norm`` ends all depths. Layout: vLLM ``models/inkling/nvidia/mtp.py`` and ``model.py``, transformers
``conversion_mapping.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec

BLOCK, LAYER = "mtp.{i}.block", "model.mtp.layers.{i}"
INNER = f"{LAYER}.transformer_block"


def head() -> tuple[TensorSpec, ...]:
    attn, name = f"{INNER}.attn", f"{BLOCK}.attn"
    return (
        blocks.norm("mtp.{i}.embed_norm", f"{LAYER}.embed_norm"),
        blocks.norm("mtp.{i}.hidden_norm", f"{LAYER}.hidden_norm"),
        blocks.linear("mtp.{i}.fuse", f"{LAYER}.input_proj", "hidden", "2*hidden"),
        blocks.norm("mtp.0.out_norm", "model.mtp.chain_norm", when=("chain_norm",)),
        blocks.norm(f"{BLOCK}.input_norm", f"{INNER}.attn_norm"),
        blocks.norm(f"{BLOCK}.post_norm", f"{INNER}.mlp_norm"),
        blocks.linear(f"{name}.q", f"{attn}.wq_du", "?", "hidden"),
        blocks.linear(f"{name}.k", f"{attn}.wk_dv", "?", "hidden"),
        blocks.linear(f"{name}.v", f"{attn}.wv_dv", "?", "hidden"),
        blocks.linear(f"{name}.r", f"{attn}.wr_du", "?", "hidden"),
        blocks.linear(f"{name}.o", f"{attn}.wo_ud", "hidden", "?"),
        blocks.norm(f"{name}.q_norm", f"{attn}.q_norm", "?"),
        blocks.norm(f"{name}.k_norm", f"{attn}.k_norm", "?"),
        blocks.tensor(f"{name}.relative.proj", f"{attn}.rel_logits_proj.proj", "?", "?"),
        blocks.tensor(f"{name}.k_conv.weight", f"{attn}.k_sconv.weight", "?", "one", "?"),
        blocks.tensor(f"{name}.v_conv.weight", f"{attn}.v_sconv.weight", "?", "one", "?"),
        blocks.tensor(f"{BLOCK}.attn_conv.weight", f"{INNER}.attn_sconv.weight", "hidden", "one", "?"),
        blocks.tensor(f"{BLOCK}.mlp_conv.weight", f"{INNER}.mlp_sconv.weight", "hidden", "one", "?"),
        blocks.linear(f"{BLOCK}.mlp.gate_up", f"{INNER}.mlp.w13_dn", "?", "hidden"),
        blocks.linear(f"{BLOCK}.mlp.down", f"{INNER}.mlp.w2_md", "hidden", "?"),
        blocks.tensor(f"{BLOCK}.mlp.scale", f"{INNER}.mlp.global_scale", "one", when=("global_scale",)),
    )


def derive(text: Mapping[str, Any]) -> dict[str, int]:
    """`chain_norm` and `global_scale`: on unless the config turns them off."""
    return {
        "chain_norm": int(bool(text.get("chain_hidden_post_norm", True))),
        "global_scale": int(bool(text.get("use_global_scale", True))),
    }


INKLING = Family(
    name="inkling",
    title="Inkling",
    architectures=("InklingForConditionalGeneration", "InklingForCausalLM"),
    model_types=("inkling_mm_model", "inkling_model", "inkling_text"),
    layer_count=("mtp_config.num_nextn_predict_layers", "text_config.num_mtp_layers", "num_mtp_layers"),
    default_layers=None,
    head=head(),
    order="hidden_first",
    target_hidden="pre_norm",
    physical_layers="chain",
    block="full or sliding-window attention with relative logits and short convolutions, dense MLP",
    ignored=(r"model\.(visual|audio)\..*",),
    derive=derive,
    confidence="partial",
    note="chain_hidden_post_norm in mtp_config decides whether chain_norm exists; sizes differ between depths.",
    source="vllm/models/inkling/nvidia/mtp.py, model.py; transformers/conversion_mapping.py",
)
