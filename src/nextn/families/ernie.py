"""ERNIE-4.5-MoE: the head is spread over four lists of the model, and has no end norm.

The layer is dense though the target is sparse. Layout: vLLM ``models/ernie_mtp.py``, SGLang ``models/ernie4_eagle.py``;
neither applies a norm after the layer, and both blank the embedding at position 0.
"""

from __future__ import annotations

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import COUNT, INV_FREQ

BLOCK, LAYER = "mtp.{i}.block", "model.mtp_block.{i}"


def head() -> tuple[TensorSpec, ...]:
    return (
        blocks.norm("mtp.{i}.embed_norm", "model.mtp_emb_norm.{i}"),
        blocks.norm("mtp.{i}.hidden_norm", "model.mtp_hidden_norm.{i}"),
        blocks.linear("mtp.{i}.fuse", "model.mtp_linear_proj.{i}", "hidden", "2*hidden"),
        *blocks.layer_norms(LAYER),
        *blocks.gqa(f"{BLOCK}.attn", f"{LAYER}.self_attn"),
        *blocks.mlp(f"{BLOCK}.mlp", f"{LAYER}.mlp"),
    )


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    title="ERNIE-4.5-MoE",
    architectures=("Ernie4_5_MoeForCausalLM",),
    model_types=("ernie4_5_moe",),
    layer_count=COUNT,
    default_layers=None,
    head=head(),
    recycle="pre_norm",
    zero_embed_at_start=True,
    embedding="tied",
    output_head="tied",
    block="full attention, dense MLP",
    ignored=INV_FREQ,
    note="There is no end norm: what the layer gives goes to the output head and to the next step.",
    source="vllm/model_executor/models/ernie_mtp.py; sglang/srt/models/ernie4_eagle.py",
)
