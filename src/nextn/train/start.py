"""Where a run starts: the frozen target, its trainable head, and what the head's first weights are.

The target keeps the dtype it is loaded in; the head is held in float32 (float64 beside a float64 target), whatever
dtype it is stored in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nextn.assets import embedded_model
from nextn.checkpoint.download import local_folder
from nextn.checkpoint.draft_ids import draft_ids
from nextn.checkpoint.source import Checkpoint, open_checkpoint
from nextn.errors import NextnError
from nextn.models.blocks import Linear, RMSNorm
from nextn.models.config import DecoderConfig, decoder_config
from nextn.models.decoder import DecoderLayer, Drafter
from nextn.models.layout import head_keys, target_keys
from nextn.models.load import (
    LoadReport,
    Progress,
    check_wanted,
    count_head_layers,
    default_dtype,
    fill_slots,
)
from nextn.models.mtp import MTPHead
from nextn.models.slots import slots
from nextn.train.config import TrainConfig
from nextn.train.load_target import load_target
from nextn.train.processes import Processes
from nextn.train.unroll import HeadUnroll, head_unroll, require_layers

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
CERTAINTY = 0.25
"""Of a head from scratch, over the target's: logits as large as the target's are certain of the wrong token, and the
first steps are spent on unlearning that."""


@dataclass
class Start:
    """A target and a head ready to be trained.

    Attributes:
        checkpoint: the target's.
        model: the target with the head inside; only what drafting needs of it when hidden states are cached.
        unroll: the head's draft steps as one module; its parameters are the only trainable ones.
        initial: copies of the head's first weights, by name, on the CPU.
        experts: how the head's routed experts are to be stored: ``split`` or ``grouped``.
        draft_ids: those that the head drafted before, where its folder names them.
    """

    checkpoint: Checkpoint
    model: Drafter
    unroll: HeadUnroll
    initial: dict[str, Tensor]
    experts: str
    draft_ids: list[int] | None = None


def open_target(config: TrainConfig) -> Checkpoint:
    """The target's checkpoint, downloaded if need be."""
    return open_checkpoint(local_folder(config.model if config.model is not None else embedded_model()))


def target_dtype(config: TrainConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Of the frozen target's weights."""
    if config.target_dtype != "auto":
        return DTYPES[config.target_dtype]
    return default_dtype(checkpoint, device)


def start(config: TrainConfig, processes: Processes, *, layers: bool = True, progress: Progress | None = None) -> Start:
    """Load the target and make its head ready.

    Args:
        layers: with the target's layers; without them only embedding and output head are loaded.
    Raises:
        NextnError: no head where ``init`` is native, no such head folder, unusable weights, more draft steps than the
            head has layers for.
    """
    checkpoint = open_target(config)
    dtype = target_dtype(config, checkpoint, processes.device)
    source = _head_source(config, checkpoint)
    model = load_target(checkpoint, dtype, processes, layers=layers, progress=progress)
    _attach_head(model, source, torch.float64 if dtype == torch.float64 else torch.float32, processes.device)
    unroll = head_unroll(model)
    if source is not None:
        wanted = [(source, name, key) for name, key in head_keys(model.config, source.config, source.tensors)]
        check_wanted(wanted, slots(unroll))
        fill_slots(wanted, slots(unroll), LoadReport())
    else:
        initialise(unroll.mtp, model.config, _final_norm(checkpoint, model.config), _spread(checkpoint), config.seed)
    require_layers(model, config.unroll)
    model.requires_grad_(False)
    unroll.requires_grad_(True)
    require_frozen(model, unroll)
    initial = {name: p.detach().cpu().clone() for name, p in unroll.named_parameters()}
    grouped = source is not None and any(
        key.endswith("experts.gate_up_proj") and "mtp" in key for key in source.tensors
    )
    listed = draft_ids(source) if source is not None else None
    return Start(checkpoint, model, unroll, initial, "grouped" if grouped else "split", listed)


def _head_source(config: TrainConfig, checkpoint: Checkpoint) -> Checkpoint | None:
    """Where the head's weights come from; None: from scratch."""
    if config.init == "scratch":
        return None
    native = config.init == "native"
    source = checkpoint if native else open_checkpoint(local_folder(config.init))
    if not count_head_layers(source, decoder_config(checkpoint.config)):
        raise NextnError(
            f"{source.source} has no MTP head{', so there is none to start from' if native else ''}.",
            "Use init=scratch, or init=FOLDER with a head of a model of this size.",
        )
    return source


def _attach_head(model: Drafter, source: Checkpoint | None, dtype: torch.dtype, device: torch.device) -> None:
    """Give the target an uninitialised head with as many layers as `source` holds; one from scratch."""
    reused = source is None or model.config.family.physical_layers == "reuse"
    count = 1 if reused or source is None else count_head_layers(source, model.config)
    config = model.config = replace(model.config, head_layers=count)
    with device:
        head = MTPHead(config, lambda i: DecoderLayer(config, "full", i, config.head_sparse))
    model.mtp = head.to(dtype)


def _spread(checkpoint: Checkpoint) -> float:
    text = checkpoint.config.get("text_config") or checkpoint.config
    return float(text.get("initializer_range") or 0.02)


def _final_norm(checkpoint: Checkpoint, config: DecoderConfig) -> Tensor:
    """Weight [hidden] of the target's final norm."""
    assert checkpoint.root is not None
    pairs = target_keys(config, checkpoint.config, checkpoint.tensors)
    key = next(key for name, key in pairs if name == "norm.weight")
    with safe_open(checkpoint.root / checkpoint.tensors[key].file, "pt") as file:
        weight: Tensor = file.get_tensor(key)
    return weight


@torch.no_grad()
def initialise(head: MTPHead, config: DecoderConfig, final_norm: Tensor, spread: float, seed: int) -> None:
    """First weights of a head from scratch, the same for a seed on every device.

    Matrices are normal with the target's own spread; norms change nothing, except the end norm, which is the target's
    final norm, CERTAINTY times as strong. Fusion starts by passing the hidden state on, so that the output head gets
    something it can read from the first step.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in head.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(0.0 if module.one_plus else 1.0)
            elif name == "bias":
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    hidden = config.hidden
    for fusion in head.fusions:
        matrix = fusion.fuse
        assert isinstance(matrix, Linear)
        first = hidden if config.family.order == "embed_first" else 0
        matrix.weight[:, first : first + hidden] += torch.eye(hidden, device=matrix.weight.device)
    for norm in head.out_norms:
        assert isinstance(norm, RMSNorm)
        norm.weight.copy_((1 + final_norm) * CERTAINTY - 1 if norm.one_plus else final_norm * CERTAINTY)


def require_frozen(model: nn.Module, unroll: HeadUnroll) -> None:
    """Raises NextnError where training would change a parameter of the target."""
    head = {id(p) for p in unroll.parameters()}
    stores = {_memory(p) for p in unroll.parameters() if p.numel()}
    for name, parameter in model.named_parameters():
        if id(parameter) in head:
            continue
        shared = _memory(parameter) in stores
        if parameter.requires_grad or shared:
            why = "shares its memory with the head" if shared else "is not frozen"
            raise NextnError(
                f"Training would change the target: {name} {why}.", "The target must stay as it is; load it anew."
            )


def _memory(parameter: Tensor) -> int:
    """Address of the memory that a parameter, or this process's share of it, lies in."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.untyped_storage().data_ptr()
