"""Xiaomi MiMo-7B and MiMo-V2.

MiMo-7B is the one common family that puts the hidden state first in the concatenation. MiMo-V2 ships three heads, each
a dense layer with sliding-window attention of its own head count, fed from the target's hidden state; V2-Flash stores
q, k and v apart, V2.5 and Pro fused. Layout: vLLM ``models/mimo_mtp.py``, ``mimo_v2_mtp.py``, SGLang
``models/mimo_v2_nextn.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import COUNT, INV_FREQ

BLOCK = "mtp.{i}.block"
V1, V2 = "model.mtp_layers.{i}", "model.mtp.layers.{i}"


def v1_head() -> tuple[TensorSpec, ...]:
    return (
        *blocks.projected_head(
            V1,
            embed_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            fuse="input_proj",
            out_norm="final_layernorm",
        ),
        *blocks.layer_norms(V1),
        *blocks.gqa(f"{BLOCK}.attn", f"{V1}.self_attn", bias=True),
        *blocks.mlp(f"{BLOCK}.mlp", f"{V1}.mlp"),
    )


def v2_head(*, fused: bool) -> tuple[TensorSpec, ...]:
    attn = blocks.gqa(f"{BLOCK}.attn", f"{V2}.self_attn", sizes="swa_")
    if fused:
        rows = "swa_heads*swa_head_dim+swa_kv_heads*swa_head_dim+swa_kv_heads*swa_v_head_dim"
        o_proj = tuple(spec for spec in attn if spec.name == f"{BLOCK}.attn.o.weight")
        attn = (
            blocks.linear(f"{BLOCK}.attn.qkv", f"{V2}.self_attn.qkv_proj", rows, "hidden"),
            blocks.tensor(f"{BLOCK}.attn.qkv.bias", f"{V2}.self_attn.qkv_proj.bias", rows, when=("attention_bias",)),
            *o_proj,
        )
    return (
        *blocks.projected_head(V2, out_norm="final_layernorm"),
        *blocks.layer_norms(V2, post="pre_mlp_layernorm"),
        *attn,
        blocks.tensor(f"{BLOCK}.attn.sink", f"{V2}.self_attn.attention_sink_bias", "swa_heads", when=("sinks",)),
        *blocks.mlp(f"{BLOCK}.mlp", f"{V2}.mlp"),
    )


def derive(text: Mapping[str, Any]) -> dict[str, int]:
    return {"sinks": int(bool(text.get("add_swa_attention_sink_bias", False)))}


MIMO = Family(
    name="mimo",
    title="MiMo-7B",
    architectures=("MiMoForCausalLM",),
    model_types=("mimo",),
    layer_count=COUNT,
    default_layers=None,
    head=v1_head(),
    order="hidden_first",
    zero_embed_at_start=True,
    block="full attention with biases, dense MLP",
    ignored=INV_FREQ,
    source="vllm/model_executor/models/mimo_mtp.py; sglang/srt/models/mimo_mtp.py",
)


def v2(name: str, title: str, architectures: tuple[str, ...], model_types: tuple[str, ...], *, fused: bool) -> Family:
    return Family(
        name=name,
        title=title,
        architectures=architectures,
        model_types=model_types,
        layer_count=COUNT,
        default_layers=3,
        declares_count=False,
        head=v2_head(fused=fused),
        target_hidden="pre_norm",
        recycle="pre_norm",
        physical_layers="one_each",
        block="sliding-window attention with sinks, dense MLP",
        ignored=(*INV_FREQ, r"(model\.)?visual\..*", r"(audio|speech)_.*"),
        derive=derive,
        note="vLLM runs the first of the heads, SGLang all.",
        source="vllm/model_executor/models/mimo_v2_mtp.py; sglang/srt/models/mimo_v2_nextn.py",
    )


MIMO_V2_FLASH = v2("mimo_v2_flash", "MiMo-V2-Flash", ("MiMoV2FlashForCausalLM",), ("mimo_v2_flash",), fused=False)
MIMO_V2 = v2(
    "mimo_v2", "MiMo-V2.5 / Pro", ("MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM"), ("mimo_v2", "mimovl"), fused=True
)
