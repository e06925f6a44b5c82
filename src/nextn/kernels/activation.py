"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * inter] with the gate first; returns [..., inter]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate): the output gate of attention in Qwen3-Next and Qwen3.5."""
    return x * torch.sigmoid(gate)
