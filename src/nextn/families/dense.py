"""Plain dense decoders (Llama, Qwen2, Qwen3) carrying a head in the ``mtp.`` layout with plain norms.

No publisher ships such heads; they are what `nextn train` makes for a dense target. The head repeats the target's
own decoder layer: biases on q, k, v for Qwen2, norms on q and k for Qwen3. Target layout: transformers
``models/llama``, ``models/qwen2``, ``models/qwen3``.
"""

from __future__ import annotations

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec


def head(*, qk_norm: bool, bias: bool) -> tuple[TensorSpec, ...]:
    block, key = "mtp.{i}.block", "mtp.layers.{i}"
    return (
        *blocks.concat_head("mtp"),
        blocks.norm(f"{block}.input_norm", f"{key}.input_layernorm"),
        *blocks.gqa(f"{block}.attn", f"{key}.self_attn", qk_norm=qk_norm, bias=bias),
        blocks.norm(f"{block}.post_norm", f"{key}.post_attention_layernorm"),
        *blocks.mlp(f"{block}.mlp", f"{key}.mlp"),
    )


def target(*, qk_norm: bool, bias: bool) -> tuple[TensorSpec, ...]:
    layer, key = "layers.{l}", "model.layers.{l}"
    return (
        blocks.linear("embed", "model.embed_tokens", "vocab", "hidden"),
        blocks.norm(f"{layer}.input_norm", f"{key}.input_layernorm"),
        *blocks.gqa(f"{layer}.attn", f"{key}.self_attn", qk_norm=qk_norm, bias=bias),
        blocks.norm(f"{layer}.post_norm", f"{key}.post_attention_layernorm"),
        *blocks.mlp(f"{layer}.mlp", f"{key}.mlp"),
        blocks.norm("norm", "model.norm"),
        blocks.linear("head", "lm_head", "vocab", "hidden", ("!tied",)),
    )


def family(name: str, title: str, architecture: str, *, qk_norm: bool, bias: bool) -> Family:
    return Family(
        name=name,
        title=title,
        architectures=(architecture,),
        model_types=(name,),
        layer_count=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        default_layers=None,
        head=head(qk_norm=qk_norm, bias=bias),
        target=target(qk_norm=qk_norm, bias=bias),
        ignored=(r".*\.rotary_emb\.inv_freq",),
        constants=(("o_bias", int(not bias)),),
        source=f"transformers/models/{name}; the head is nextn's own layout",
    )


LLAMA = family("llama", "Llama", "LlamaForCausalLM", qk_norm=False, bias=False)
QWEN2 = family("qwen2", "Qwen2", "Qwen2ForCausalLM", qk_norm=False, bias=True)
QWEN3 = family("qwen3", "Qwen3", "Qwen3ForCausalLM", qk_norm=True, bias=False)
