"""A decoder or its head back to checkpoint tensors: the inverse of loading, through the same slots and layouts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nextn.models.config import DecoderConfig
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
    present = {f"{prefix}embed_tokens.weight", *_probe(prefix, model.config.layers, experts)}
    state: dict[str, Tensor] = {}
    if "target" in parts:
        state |= _read(model, target_keys(model.config, raw, present), dtype)
    if "head" in parts and model.mtp is not None:
        state |= head_state(model, model.config, raw, dtype=dtype, experts=experts)
    return state


def head_state(
    holder: nn.Module, config: DecoderConfig, raw: dict[str, Any], *, dtype: torch.dtype, experts: str
) -> dict[str, Tensor]:
    """Checkpoint key -> tensor of the head alone, on the CPU.

    Args:
        holder: a module with the head as its `mtp`.
        config, raw, dtype, experts: as in `decoder_state`.
    """
    present = _probe("mtp.", config.head_layers, experts)
    return _read(holder, head_keys(config, raw, present), dtype)


def _probe(prefix: str, layers: int, experts: str) -> set[str]:
    """Keys that decide how experts are stored, as a checkpoint of that storage would show them."""
    probe = (
        ("gate_up_proj", "down_proj")
        if experts == "grouped"
        else ("0.gate_proj.weight", "0.up_proj.weight", "0.down_proj.weight")
    )
    return {f"{prefix}layers.{i}.mlp.experts.{p}" for i in range(layers) for p in probe}


def _read(holder: nn.Module, names: Iterable[tuple[str, str]], dtype: torch.dtype) -> dict[str, Tensor]:
    places = slots(holder)
    state = {}
    for name, key in names:
        value = places[name].read()
        if name.endswith("conv.weight"):
            value = value[:, None]
        state[key] = value.to("cpu", dtype).contiguous()
    return state
