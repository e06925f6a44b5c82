"""Qwen3.8-Flash-Next (``qwen4_exp``): Qwen3-Next's place with residual streams and a fusion by sum.

``fc_embedding`` of the embedding is added to ``fc_hidden`` of every stream; the streams end in a mixer instead of a
norm. Attention carries an indexer and the output gate. Layout: SGLang ``models/qwen4_exp_mtp.py``, vLLM
``models/qwen4_exp/nvidia/mtp.py``, transformers ``models/qwen4_exp``.
"""

from __future__ import annotations

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.qwen3_5 import VISION

BLOCK, LAYER = "mtp.{i}.block", "mtp.layers.{i}"


def mixer(name: str, key: str, *, inject: bool) -> tuple[TensorSpec, ...]:
    """One gated residual over the streams; `inject` where the sublayer's output is put back into them."""
    specs = (
        blocks.norm(f"{name}.norm", f"{key}.hc_norm", "streams*hidden"),
        blocks.linear(f"{name}.down", f"{key}.input_mix_weight_down", "stream_lora", "streams*hidden"),
        blocks.linear(f"{name}.up", f"{key}.input_mix_weight_up", "streams*hidden", "stream_lora"),
    )
    if not inject:
        return specs
    return (*specs, blocks.linear(f"{name}.inject", f"{key}.block_inject_weight", "streams", "streams*hidden"))


def head() -> tuple[TensorSpec, ...]:
    attn, index = f"{LAYER}.self_attn", f"{BLOCK}.attn.index"
    rows = "index_heads*index_dim+index_kv_heads*index_dim"
    return (
        blocks.norm("mtp.0.embed_norm", "mtp.pre_fc_norm_embedding"),
        blocks.norm("mtp.0.hidden_norm", "mtp.pre_fc_norm_hidden", "streams*hidden"),
        blocks.linear("mtp.0.fuse_embed", "mtp.fc_embedding", "hidden", "hidden"),
        blocks.linear("mtp.0.fuse_hidden", "mtp.fc_hidden", "hidden", "hidden"),
        *mixer("mtp.0.out_mixer", "mtp.hyper_connection_mixer", inject=False),
        *mixer(f"{BLOCK}.attn_streams", f"{LAYER}.attn_hyper_connection", inject=True),
        *mixer(f"{BLOCK}.moe_streams", f"{LAYER}.mlp_hyper_connection", inject=True),
        *blocks.gqa(f"{BLOCK}.attn", attn, qk_norm=True),
        blocks.linear(f"{index}.qk", f"{attn}.indexer.index_qk_proj", rows, "hidden", ("index_heads",)),
        blocks.norm(f"{index}.q_norm", f"{attn}.indexer.q_layernorm", "index_dim", ("index_heads",)),
        blocks.norm(f"{index}.k_norm", f"{attn}.indexer.k_layernorm", "index_dim", ("index_heads",)),
        *blocks.qwen_moe(f"{BLOCK}.moe", f"{LAYER}.mlp"),
        blocks.tensor("mtp.0.embed.weight", "mtp.embed_tokens.weight", "vocab", "hidden", optional=True),
        blocks.tensor("mtp.0.head.weight", "mtp.shared_head.head.weight", "vocab", "hidden", optional=True),
    )


QWEN4_EXP = Family(
    name="qwen4_exp",
    title="Qwen3.8-Flash-Next",
    architectures=("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"),
    model_types=("qwen4_exp", "qwen4_exp_text"),
    layer_count=(
        "text_config.mtp_num_hidden_layers",
        "mtp_num_hidden_layers",
        "text_config.num_nextn_predict_layers",
        "text_config.mtp.num_hidden_layers",
    ),
    default_layers=1,
    head=head(),
    prefixes=("", "model.language_model.", "model.", "language_model."),
    fuse="sum",
    norm="one_plus",
    target_hidden="pre_norm",
    recycle="pre_norm",
    block="gated sparse attention with an indexer, mixture of experts with a shared expert, residual streams",
    ignored=VISION,
    constants=(("q_gate", 2), ("o_bias", 1)),
    note="The head's state is the bundle of streams before the mixer, which takes the place of the end norm.",
    source="sglang/srt/models/qwen4_exp_mtp.py; vllm/models/qwen4_exp/nvidia/mtp.py; transformers/models/qwen4_exp",
)
