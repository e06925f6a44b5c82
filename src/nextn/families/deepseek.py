"""DeepSeek V3, R1 and V3.2: the layout that most later families follow, one more decoder layer after the target's.

The layer at index num_hidden_layers holds the fusion (``enorm``, ``hnorm``, ``eh_proj``), latent attention, a sparse
block and ``shared_head.norm``. Published checkpoints carry copies of embedding and output head beside it, which no
engine reads. V3.2 adds the indexer. Layout: SGLang ``models/deepseek_nextn.py``, vLLM ``models/deepseek_mtp.py``.
"""

from __future__ import annotations

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec

LAYER = "model.layers.{n}"
COUNT = ("num_nextn_predict_layers", "num_mtp_layers")
"""transformers from 5.14 saves the field under the second name."""
NESTED_COUNT = (*COUNT, *(f"text_config.{name}" for name in COUNT))
INV_FREQ = (r".*\.rotary_emb\.inv_freq",)


def head(*, indexer: bool = True) -> tuple[TensorSpec, ...]:
    block = "mtp.{i}.block"
    return (
        *blocks.projected_head(LAYER),
        *blocks.layer_norms(LAYER),
        *blocks.mla(f"{block}.attn", f"{LAYER}.self_attn", indexer=indexer),
        *blocks.routed_moe(f"{block}.moe", f"{LAYER}.mlp"),
        *blocks.copies(LAYER),
    )


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    title="DeepSeek V3 / R1 / V3.2",
    architectures=("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
    model_types=("deepseek_v3", "deepseek_v32"),
    layer_count=COUNT,
    default_layers=None,
    head=head(),
    zero_embed_at_start=True,
    block="latent attention (with an indexer in V3.2), mixture of experts with a shared expert",
    ships_copies=True,
    ignored=INV_FREQ,
    source="sglang/srt/models/deepseek_nextn.py; vllm/model_executor/models/deepseek_mtp.py",
)
