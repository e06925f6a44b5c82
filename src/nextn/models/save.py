"""A decoder or its head back to checkpoint tensors: the inverse of loading, through the same slots and layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nextn.models.decoder import Decoder
from nextn.models.layout import head_keys, target_keys
from nextn.models.slots import slots


def decoder_state(
    model: Decoder,
    raw: dict[str, Any],
    *,
    dtype: torch.dtype,
    prefix: str = "model.",
    experts: str = "grouped",
    parts: tuple[str, ...] = ("target", "head"),
) -> dict[str, Tensor]:
    """Checkpoint key -> tensor, on the CPU.

    Args:
        raw: the config.json that will stand beside the tensors.
        dtype: of matrices; parameters kept in higher precision are stored in it too.
        prefix: before the target's keys.
        experts: ``grouped`` or ``split``.
        parts: what to include.
    """
    places = slots(model)
    present = {f"{prefix}embed_tokens.weight"}
    # Keys that decide how experts are stored, as a checkpoint of that storage would show them.
    probe = (
        ("gate_up_proj", "down_proj")
        if experts == "grouped"
        else ("0.gate_proj.weight", "0.up_proj.weight", "0.down_proj.weight")
    )
    present |= {f"{prefix}layers.{i}.mlp.experts.{p}" for i in range(model.config.layers) for p in probe}
    present |= {f"mtp.layers.{i}.mlp.experts.{p}" for i in range(model.config.head_layers) for p in probe}
    names: list[tuple[str, str]] = []
    if "target" in parts:
        names += target_keys(model.config, raw, present)
    if "head" in parts and model.mtp is not None:
        names += head_keys(model.config, raw, present)
    state = {}
    for name, key in names:
        value = places[name].read()
        if name.endswith("conv.weight"):
            value = value[:, None]
        state[key] = value.to("cpu", dtype).contiguous()
    return state
