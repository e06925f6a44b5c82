"""A trained head as a folder that `merge`, `--head` and `inspect` take, and the target with it merged in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from nextn.checkpoint.draft_ids import DRAFT_IDS
from nextn.checkpoint.save import save_tensors
from nextn.checkpoint.source import Checkpoint, open_checkpoint
from nextn.errors import NextnError
from nextn.models.load import DTYPES, count_head_layers
from nextn.models.save import head_state
from nextn.surgery.extract import HEAD_FILE
from nextn.surgery.merge import MergeOptions, plan_merge
from nextn.surgery.settings import with_count, without_quantisation
from nextn.surgery.write import write
from nextn.train.shard import gathered
from nextn.train.start import Start


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What the target's embedding is stored in, and so its head."""
    key = next(k for k in checkpoint.tensors if k.endswith("embed_tokens.weight"))
    return DTYPES[checkpoint.tensors[key].dtype]


def write_head(begun: Start, out: Path, *, first: bool) -> None:
    """Write config.json and one safetensors file into `out`, which may hold other things.

    Args:
        first: this process writes; the others only lend their share of a sharded head.
    Raises:
        NextnError: the head is, as it would be stored, what it was before training; or the disk is full.
    """
    dtype = stored_dtype(begun.checkpoint)
    with gathered(begun.unroll):
        if not first:
            return
        _refuse_unchanged(begun, dtype)
        family = begun.model.config.family
        config = without_quantisation(with_count(family, dict(begun.checkpoint.config), begun.model.config.head_layers))
        state = head_state(begun.unroll, begun.model.config, config, dtype=dtype, experts=begun.experts)
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out / HEAD_FILE, state)
    write_json(out / "config.json", config)


def place_draft_ids(out: Path, ids: Tensor | None) -> None:
    """Write the ids that the head is trained to draft into its folder; no file says all."""
    if ids is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / DRAFT_IDS, {"ids": ids.tolist()})
    else:
        (out / DRAFT_IDS).unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, whole or not at all.

    Raises:
        NextnError: the disk is full or fails.
    """
    stage = path.with_name(f".{path.name}")
    try:
        save_tensors(stage, tensors)
    except (OSError, SafetensorError) as error:
        stage.unlink(missing_ok=True)
        raise NextnError(
            f"{path} cannot be written ({str(error).strip().rstrip('.')}).",
            "Make room, then run the same command again: it goes on.",
        ) from None
    os.replace(stage, path)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """A JSON file, whole or not at all."""
    stage = path.with_name(f".{path.name}")
    stage.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(stage, path)


def merge_head(begun: Start, head: Path, out: Path) -> None:
    """Write the target with the head merged in, replacing one that it has."""
    target = begun.checkpoint
    had = count_head_layers(target, begun.model.config) > 0
    write(plan_merge(target, open_checkpoint(head), out, MergeOptions(replace=had)))


def _refuse_unchanged(begun: Start, dtype: torch.dtype) -> None:
    def stored(value: Tensor) -> Tensor:
        return value.detach().to("cpu", dtype)

    if all(torch.equal(stored(p), stored(begun.initial[name])) for name, p in begun.unroll.named_parameters()):
        raise NextnError(
            f"The head is byte for byte what it was before training (in {str(dtype).removeprefix('torch.')}).",
            "Train for more steps or with a higher lr.",
            exit_code=1,
        )
