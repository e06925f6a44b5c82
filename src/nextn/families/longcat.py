"""LongCat-Flash: one head under ``model.mtp.``, dense, with latent attention.

The norms sit under ``enorm.m`` and ``hnorm.m``, the MLP under ``transformer_layer``, the end norm beside the layers.
The checkpoint carries an embedding, which the engines replace by the target's. Layout: vLLM
``models/longcat_flash_mtp.py``, SGLang ``models/longcat_flash_nextn.py``.
"""

from __future__ import annotations

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec
from nextn.families.deepseek import INV_FREQ

BLOCK, LAYER = "mtp.{i}.block", "model.mtp.layers.{i}"


def head() -> tuple[TensorSpec, ...]:
    return (
        blocks.norm("mtp.{i}.embed_norm", f"{LAYER}.enorm.m"),
        blocks.norm("mtp.{i}.hidden_norm", f"{LAYER}.hnorm.m"),
        blocks.linear("mtp.{i}.fuse", f"{LAYER}.eh_proj", "hidden", "2*hidden"),
        blocks.norm("mtp.0.out_norm", "model.mtp.norm"),
        *blocks.layer_norms(LAYER),
        *blocks.mla(f"{BLOCK}.attn", f"{LAYER}.self_attn"),
        *blocks.mlp(f"{BLOCK}.mlp", f"{LAYER}.transformer_layer.mlp"),
        blocks.tensor("mtp.0.embed.weight", "model.mtp.embed_tokens.weight", "vocab", "hidden", optional=True),
    )


LONGCAT_FLASH = Family(
    name="longcat_flash",
    title="LongCat-Flash",
    architectures=("LongcatFlashForCausalLM",),
    model_types=("longcat_flash",),
    layer_count=("num_nextn_predict_layers",),
    default_layers=1,
    declares_count=False,
    head=head(),
    block="latent attention, dense MLP",
    ships_copies=True,
    ignored=INV_FREQ,
    source="vllm/model_executor/models/longcat_flash_mtp.py; sglang/srt/models/longcat_flash_nextn.py",
)
