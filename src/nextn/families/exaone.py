"""EXAONE-MoE and EXAONE 4.5: Qwen3-Next's ``mtp.`` fusion with plain norms and a dense layer.

EXAONE-MoE's head layer is dense though the target is sparse; EXAONE 4.5's layer normalises after its sublayers.
Layout: vLLM ``models/exaone_moe_mtp.py``, ``exaone4_5_mtp.py``, ``exaone4.py``, SGLang ``models/exaone_moe_mtp.py``.
"""

from __future__ import annotations

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import INV_FREQ, NESTED_COUNT

BLOCK, LAYER = "mtp.{i}.block", "mtp.layers.{i}"


def head(norms: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return (
        *blocks.concat_head("mtp"),
        *norms,
        *blocks.gqa(f"{BLOCK}.attn", f"{LAYER}.self_attn", qk_norm=True),
        *blocks.mlp(f"{BLOCK}.mlp", f"{LAYER}.mlp"),
    )


EXAONE_MOE = Family(
    name="exaone_moe",
    title="EXAONE-MoE",
    architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    model_types=("exaone_moe",),
    layer_count=NESTED_COUNT,
    default_layers=None,
    head=head(blocks.layer_norms(LAYER)),
    embedding="tied",
    output_head="tied",
    block="full attention, dense MLP",
    ignored=INV_FREQ,
    constants=(("o_bias", 1),),
    source="vllm/model_executor/models/exaone_moe_mtp.py; sglang/srt/models/exaone_moe_mtp.py",
)

EXAONE4_5 = Family(
    name="exaone4_5",
    title="EXAONE 4.5",
    architectures=("Exaone4_5_ForConditionalGeneration",),
    model_types=("exaone4_5",),
    layer_count=NESTED_COUNT,
    default_layers=None,
    head=head(
        (
            blocks.norm(f"{BLOCK}.post_attn_norm", f"{LAYER}.post_attention_layernorm"),
            blocks.norm(f"{BLOCK}.post_mlp_norm", f"{LAYER}.post_feedforward_layernorm"),
        )
    ),
    embedding="tied",
    output_head="tied",
    block="full attention, dense MLP, norms after the sublayers",
    ignored=(*INV_FREQ, r"model\.visual\..*"),
    source="vllm/model_executor/models/exaone4_5_mtp.py",
)
