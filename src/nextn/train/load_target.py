"""Load the frozen target without its head: whole, or a layer at a time where processes share it.

Each process of several reads every layer, keeps its share and frees the rest before the next, so that a target which
no single GPU holds can be trained for.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from nextn.checkpoint.source import Checkpoint
from nextn.models.config import DecoderConfig, decoder_config
from nextn.models.decoder import Decoder, Drafter, Rotary
from nextn.models.layout import target_keys
from nextn.models.load import (
    LoadReport,
    Progress,
    Wanted,
    build,
    check_unexpected,
    check_wanted,
    fill_slots,
    load_decoder,
    refuse_quantised,
)
from nextn.models.slots import slots
from nextn.train.processes import Processes
from nextn.train.shard import mesh_of

DRAFTING = ("embed.weight", "head.weight")


def load_target(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    processes: Processes,
    *,
    layers: bool = True,
    progress: Progress | None = None,
) -> Drafter:
    """The target without a head.

    Args:
        layers: with its layers (a `Decoder`, sharded layer by layer where there are several processes); without
            them embedding and output head alone.
    Raises:
        NextnError: as `load_decoder`.
    """
    if layers and processes.world == 1:
        return load_decoder(checkpoint, dtype=dtype, device=processes.device, mtp=False, progress=progress)[0]
    refuse_quantised(checkpoint)
    config = replace(decoder_config(checkpoint.config), head_layers=0)
    pairs = target_keys(config, checkpoint.config, checkpoint.tensors)
    wanted: list[Wanted] = [(checkpoint, name, key) for name, key in pairs]
    if layers:
        return _by_layers(checkpoint, config, wanted, dtype, processes, progress)
    model = build(config, dtype=dtype, device=processes.device, kind=Drafter)
    _fill(model, [w for w in wanted if w[1] in DRAFTING], LoadReport(), progress)
    return model


def _by_layers(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    wanted: list[Wanted],
    dtype: torch.dtype,
    processes: Processes,
    progress: Progress | None,
) -> Decoder:
    model = build(config, dtype=dtype, device=torch.device("meta"))
    model.rotary = Rotary(config).to(processes.device)
    report, mesh = LoadReport(), mesh_of(processes)
    total = sum(checkpoint.tensors[key].nbytes for _, _, key in wanted if key in checkpoint.tensors)

    def advance(done: int, _: int) -> None:
        if progress is not None:
            progress(done, total)

    for number, layer in enumerate(model.layers):
        alone = nn.Module()
        alone.layers = nn.ModuleDict({str(number): layer})
        _materialise(layer, processes.device)
        _fill(alone, [w for w in wanted if w[1].startswith(f"layers.{number}.")], report, advance)
        fully_shard(layer, mesh=mesh)
    rest = nn.Module()
    for name in ("embed", "head", "norm"):
        rest.add_module(name, getattr(model, name))
    _materialise(rest, processes.device)
    _fill(rest, [w for w in wanted if not w[1].startswith("layers.")], report, advance)
    check_unexpected(checkpoint, config, {key for _, _, key in wanted})
    return model


def _fill(module: nn.Module, wanted: list[Wanted], report: LoadReport, progress: Progress | None) -> None:
    places = slots(module)
    check_wanted(wanted, places)
    fill_slots(wanted, places, report, progress)


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory, each in its dtype."""

    def empty(parameter: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = empty(parameter)
