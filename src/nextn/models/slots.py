"""Where each tensor of a layout lives inside the modules: the one map that loading and saving share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nextn.models.blocks import GatedDeltaNet, Linear, MoE, RMSNorm


@dataclass(frozen=True, slots=True)
class Slot:
    """A canonical tensor's place: some rows of a parameter.

    Attributes:
        param: the whole parameter.
        view: the part that this tensor fills, as a view of `param`.
        order: checkpoint row -> for each row of `view` in turn, the checkpoint row that fills it; None = in order.
    """

    param: Tensor
    view: Tensor
    order: Tensor | None = None

    def write(self, value: Tensor) -> None:
        """Fill from a checkpoint tensor of as many elements."""
        value = value.reshape(-1, *self.view.shape[1:]) if self.view.dim() > 1 else value.reshape(-1)
        self.view.copy_(value if self.order is None else value[self.order.to(value.device)])

    def read(self) -> Tensor:
        """The tensor in the checkpoint's row order, a copy."""
        if self.order is None:
            return self.view.detach().clone()
        out = torch.empty_like(self.view)
        out[self.order.to(out.device)] = self.view.detach()
        return out


def slots(model: nn.Module) -> dict[str, Slot]:
    """Canonical name -> slot, for every parameter of a decoder or draft model and its head, or of a head as `mtp`.

    Several names may fill one place where families store it differently (experts one by one or stacked, delta-net
    inputs fused or apart); together the names of one storage cover each parameter exactly.
    """
    found: dict[str, Slot] = {}
    for path, module in model.named_modules():
        for name, slot in _module_slots(module):
            found[_canonical(f"{path}.{name}" if path else name, module)] = slot
    return found


def _canonical(path: str, module: nn.Module) -> str:
    """Module path -> canonical name: a `Linear`'s own name gives way to its part's; the head's lists are numbered."""
    parts = path.split(".")
    if isinstance(module, Linear):
        del parts[-3]
    if parts[0] == "mtp":
        kind, number, rest = parts[1], parts[2], parts[3:]
        parts = ["mtp", number, *{"fusions": [], "out_norms": ["out_norm"], "blocks": ["block"]}[kind], *rest]
    return ".".join(parts)


def _module_slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    if isinstance(module, Linear):
        row = 0
        for part, rows in module.parts.items():
            yield f"{part}.weight", Slot(module.weight, module.weight.data[row : row + rows])
            if module.bias is not None:
                yield f"{part}.bias", Slot(module.bias, module.bias.data[row : row + rows])
            row += rows
    elif isinstance(module, RMSNorm | nn.Embedding | nn.Linear):
        yield "weight", Slot(module.weight, module.weight.data)
    elif isinstance(module, MoE):
        inter = module.down.shape[2]
        yield "experts.gate_up", Slot(module.gate_up, module.gate_up.data)
        yield "experts.down", Slot(module.down, module.down.data)
        for e in range(module.down.shape[0]):
            yield f"experts.{e}.gate.weight", Slot(module.gate_up, module.gate_up.data[e, :inter])
            yield f"experts.{e}.up.weight", Slot(module.gate_up, module.gate_up.data[e, inter:])
            yield f"experts.{e}.down.weight", Slot(module.down, module.down.data[e])
    elif isinstance(module, GatedDeltaNet):
        yield "conv.weight", Slot(module.conv, module.conv.data)
        yield "dt_bias", Slot(module.dt_bias, module.dt_bias.data)
        yield "a_log", Slot(module.a_log, module.a_log.data)
        weight = module.inputs.weight
        qkvz, ba = fused_rows(module.k_heads, module.v_heads, module.k_dim, module.v_dim)
        yield "in_qkvz.weight", Slot(weight, weight.data[: len(qkvz)], qkvz)
        yield "in_ba.weight", Slot(weight, weight.data[len(qkvz) :], ba)


def fused_rows(k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> tuple[Tensor, Tensor]:
    """Row orders of Qwen3-Next's fused delta-net inputs.

    Its ``in_proj_qkvz`` holds, a key head, [q, k, the v's, the z's of its value heads]; ``in_proj_ba`` likewise
    [the b's, the a's] (transformers ``modeling_qwen3_next.py``, fix_query_key_value_ordering). Ours is q, k, v, z, b,
    a, each over all heads.

    Returns:
        checkpoint rows in the order of ours, for qkvz and for ba.
    """
    group = v_heads // k_heads
    blocks = torch.arange(k_heads * (2 * k_dim + 2 * group * v_dim)).view(k_heads, -1)
    widths = (k_dim, k_dim, group * v_dim, group * v_dim)
    qkvz = torch.cat([part.reshape(-1) for part in blocks.split(widths, 1)])
    pairs = torch.arange(2 * v_heads).view(k_heads, -1)
    ba = torch.cat([part.reshape(-1) for part in pairs.split((group, group), 1)])
    return qkvz, ba
