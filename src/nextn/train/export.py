"""A trained head as a folder that `merge`, `--head` and `inspect` take, and the target with it merged in."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from nextn.checkpoint.draft_ids import DRAFT_IDS
from nextn.checkpoint.jsonfile import read_json
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


def merge_head(begun: Start, head: Path, out: Path, record: Path) -> None:
    """Write the target with the head merged in, replacing one that it has, and note that in a run's `record`.

    Where `out` is what the run made of this very head, nothing is done.

    Raises:
        NextnError: `out` is there and is something else, or cannot be written.
    """
    digest = _head_digest(head)
    if os.path.lexists(out):
        if merged_head(record, out) == digest:
            return
        raise NextnError(
            f"{out} exists already, with another head or changed since; the head is done: {head}.",
            f"Remove {out}, or give another merge, and run the same command again.",
        )
    target = begun.checkpoint
    had = count_head_layers(target, begun.model.config) > 0
    write(plan_merge(target, open_checkpoint(head), out, MergeOptions(replace=had)))
    write_json(record, {**_merges(record), str(out.resolve()): {"head": digest, "files": _stamps(out)}})


def merged_head(record: Path, out: Path) -> str | None:
    """Digest of the head that a run merged into `out`; None where it did not, or files of `out` have changed since."""
    noted = _merges(record).get(str(out.resolve()))
    if not isinstance(noted, dict) or not isinstance(noted.get("files"), dict) or not out.is_dir():
        return None
    there = _stamps(out)
    same = all(there.get(name) == stamp for name, stamp in noted["files"].items())
    return str(noted.get("head")) if same else None


def _merges(record: Path) -> dict[str, Any]:
    """What `merge_head` noted: path of a merged folder -> ``head``, its digest, and ``files``, their stamps."""
    try:
        return dict(read_json(record)) if record.is_file() else {}
    except NextnError:
        return {}


def _head_digest(head: Path) -> str:
    """Of the files that a merge takes from a head's folder."""
    digest = hashlib.sha256()
    for name in (HEAD_FILE, "config.json", DRAFT_IDS):
        if (head / name).is_file():
            with (head / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Name -> bytes and time of the last change in ns, of each file in a folder and below."""
    files = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: [told.st_size, told.st_mtime_ns] for name, told in sorted(files.items())}


def _refuse_unchanged(begun: Start, dtype: torch.dtype) -> None:
    def stored(value: Tensor) -> Tensor:
        return value.detach().to("cpu", dtype)

    if all(torch.equal(stored(p), stored(begun.initial[name])) for name, p in begun.unroll.named_parameters()):
        raise NextnError(
            f"The head is byte for byte what it was before training (in {str(dtype).removeprefix('torch.')}).",
            "Train for more steps or with a higher lr.",
            exit_code=1,
        )
