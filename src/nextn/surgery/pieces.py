"""A head's tensors -> the tensors that will be written: renamed, regrouped, cast, without stale scales or copies.

Stacked experts are the split ones end to end (gate, up of each expert, then all the downs), so regrouping either way
is arithmetic on byte ranges; no weight is read for it. Layout: transformers ``models/qwen3_next`` conversion,
``experts.gate_up_proj`` [experts, 2*inter, hidden] with gate rows first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

from nextn.checkpoint.tensors import TensorInfo
from nextn.errors import NextnError
from nextn.families.contract import Dims, Family
from nextn.inspect.facts import Facts, HeadTensor
from nextn.surgery.plan import Part, Piece
from nextn.surgery.remote import BlockReader

Storage = Literal["split", "grouped"]
SPLIT = re.compile(r"(?P<at>.+)\.(?P<e>\d+)\.(?P<which>gate|up|down)\.weight")
GROUPED = re.compile(r"(?P<at>.+)\.(?P<which>gate_up|down)")
DEQUANTISE_BY = ("weight_scale_inv", "weight_scale", "scale_inv", "scale")


@dataclass
class HeadPieces:
    """What became of a head's tensors.

    Attributes:
        pieces: to be written.
        renamed: source key -> new key, where they differ.
        left_out: source key -> reason.
        full: new keys of weights written in full precision; quantised: those kept quantised.
    """

    pieces: list[Piece] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    full: list[str] = field(default_factory=list)
    quantised: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """How the result wants its head.

    Attributes:
        family, dims, layers: of the checkpoint that receives the head; layers is its num_hidden_layers.
        prefix: before the head's keys.
        storage: of routed experts.
        dtype: (canonical name, stored dtype) -> dtype to write.
        keep_quantised: module in the result -> whether a weight that is stored quantised stays so, with its scales.
    """

    family: Family
    dims: Dims
    layers: int
    prefix: str
    storage: Storage
    dtype: Callable[[str, str], str]
    keep_quantised: Callable[[str], bool]


Parts = Callable[[TensorInfo], Part]


@dataclass(frozen=True)
class Source:
    """Where a head comes from: what gives the bytes of its tensors, and its config."""

    part: Parts
    config: Mapping[str, Any]


def parts_of(facts: Facts) -> Parts:
    """Gives the bytes of a head's tensors, on disk or on the hub."""
    checkpoint = facts.checkpoint
    root, read = checkpoint.root, checkpoint.read_range
    if root is not None:
        return lambda info: Part(root / info.file, info.start, info.nbytes, info.dtype)
    assert read is not None, checkpoint.source
    spans: dict[str, tuple[int, int]] = {}
    for tensor in facts.head.values():
        for info in (tensor.weight, *tensor.scales):
            first, last = spans.get(info.file, (info.start, 0))
            spans[info.file] = min(first, info.start), max(last, info.start + info.nbytes)
    readers = {file: BlockReader(read, file, first, last) for file, (first, last) in spans.items()}
    return lambda info: Part(Path(info.file), info.start, info.nbytes, info.dtype, readers[info.file])


def in_model_tree(family: Family) -> bool:
    """Whether the head's keys stand below ``model.`` beside the target's layers, and so below the target's prefix.

    Heads under names of their own (``mtp.``) are written without a prefix: engines look for the bare name only.
    """
    return any(spec.key.startswith("model.") for spec in family.head)


def head_pieces(facts: Facts, wanted: Wanted) -> HeadPieces:
    """Plan every tensor of a head.

    Raises:
        NextnError: a quantised tensor that can neither be kept nor converted.
    """
    out = HeadPieces()
    source = Source(parts_of(facts), facts.checkpoint.config)
    rest: dict[str, HeadTensor] = {}
    for name, tensor in facts.head.items():
        if is_shared_copy(tensor, wanted.family, wanted.dims):
            out.left_out[tensor.weight.key] = "copy of a tensor that the head shares with the target"
            out.left_out |= {s.key: "scale of a copy" for s in tensor.scales}
        else:
            rest[name] = tensor
    regrouped = _regroup(source, rest, wanted, out)
    for name, tensor in rest.items():
        if name in regrouped:
            continue
        key = wanted.family.key_of(name, prefix=wanted.prefix, layers=wanted.layers, experts=wanted.storage)
        _one(source, name, tensor, key, wanted, out)
    return out


def is_shared_copy(tensor: HeadTensor, family: Family, dims: Dims) -> bool:
    """Whether a head tensor repeats one that the family's head takes from the target."""
    if not tensor.spec.optional or tensor.spec.shape[:1] != ("vocab",):
        return False
    sharing = family.embedding if tensor.name.endswith(".embed.weight") else family.output_head
    return sharing == "shared" or (sharing == "tied" and bool(dims.get("tied")))


def _one(source: Source, name: str, tensor: HeadTensor, key: str, wanted: Wanted, out: HeadPieces) -> None:
    weight = tensor.weight
    bytes_of = source.part(weight)
    if tensor.form == "full":
        _add(out, Piece(key, name, wanted.dtype(name, weight.dtype), weight.shape, (bytes_of,), (weight.key,)))
        out.full.append(key)
        out.left_out |= {s.key: "stale scale: its weight is in full precision" for s in tensor.scales}
        return
    new_stem = key.removesuffix(".weight")
    if wanted.keep_quantised(new_stem):
        stem = tensor.module
        for info in (weight, *tensor.scales):
            new = new_stem + info.key.removeprefix(stem)
            _add(out, Piece(new, name, info.dtype, info.shape, (source.part(info),), (info.key,)))
        out.quantised.append(key)
        return
    scale = next((s for end in DEQUANTISE_BY for s in tensor.scales if s.key.endswith(end)), None)
    block = None if scale is None else _block(weight, scale, source)
    if tensor.form != "fp8" or scale is None or block is None:
        raise NextnError(
            f"{weight.key} is stored as {weight.dtype} ({tensor.form}), which merge cannot turn into full precision.",
            "Take the head from a checkpoint that stores it in bf16, or merge into a base of the same scheme whose"
            " lists do not exempt the head.",
        )
    dtype = wanted.dtype(name, "BF16")
    piece = Piece(key, name, dtype, weight.shape, (bytes_of,), (weight.key, scale.key), source.part(scale), block)
    _add(out, piece)
    out.full.append(key)
    out.left_out |= {s.key: "scale: its weight is written in full precision" for s in tensor.scales}


def _block(weight: TensorInfo, scale: TensorInfo, source: Source) -> tuple[int, int] | None:
    """Rows and columns that one number of a scale stands for; None where the shapes do not say."""
    if len(weight.shape) != 2:
        return None
    rows, columns = weight.shape
    numbers = prod(scale.shape)
    if numbers == 1:
        return rows, columns
    if numbers == rows and scale.shape in ((rows,), (rows, 1)):
        return 1, columns
    declared = source.config.get("quantization_config") or {}
    block = declared.get("weight_block_size") or [128, 128]
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        return None
    return (block[0], block[1]) if scale.shape == (-(-rows // block[0]), -(-columns // block[1])) else None


def _add(out: HeadPieces, piece: Piece) -> None:
    out.pieces.append(piece)
    out.renamed |= {s: piece.key for s in piece.sources if s != piece.key and s not in out.left_out}


def _regroup(source: Source, tensors: Mapping[str, HeadTensor], wanted: Wanted, out: HeadPieces) -> set[str]:
    """Plan the experts that change storage; returns the canonical names that it dealt with."""
    moving = {n: t for n, t in tensors.items() if t.spec.experts and t.spec.experts != wanted.storage}
    if not moving or not any(s.experts == wanted.storage for s in wanted.family.head):
        return set()
    quantised = next((t for t in moving.values() if t.form != "full"), None)
    if quantised is not None:
        raise NextnError(
            f"{quantised.weight.key} is quantised; its experts cannot be regrouped as {wanted.storage}.",
            f"Choose --experts {quantised.spec.experts}.",
        )
    for tensor in moving.values():
        out.left_out |= {s.key: "stale scale: its weight is in full precision" for s in tensor.scales}
    if wanted.storage == "split":
        _split(source, moving, wanted, out)
    else:
        _group(source, moving, wanted, out)
    return set(moving)


def _split(source: Source, moving: Mapping[str, HeadTensor], wanted: Wanted, out: HeadPieces) -> None:
    for name, tensor in moving.items():
        match = GROUPED.fullmatch(name)
        assert match, name
        whole = source.part(tensor.weight)
        experts, rows, columns = tensor.weight.shape
        halves = ("gate", "up") if match["which"] == "gate_up" else ("down",)
        nbytes = whole.nbytes // max(1, experts * len(halves))
        for e in range(experts):
            for h, which in enumerate(halves):
                start = whole.start + (e * len(halves) + h) * nbytes
                part = Part(whole.path, start, nbytes, whole.dtype, whole.fetch)
                shape = (rows // len(halves), columns)
                _expert(f"{match['at']}.{e}.{which}.weight", shape, (part,), (tensor.weight.key,), wanted, out)


def _group(source: Source, moving: Mapping[str, HeadTensor], wanted: Wanted, out: HeadPieces) -> None:
    found: dict[str, dict[tuple[int, str], HeadTensor]] = {}
    for name, tensor in moving.items():
        match = SPLIT.fullmatch(name)
        assert match, name
        found.setdefault(match["at"], {})[int(match["e"]), match["which"]] = tensor
    for at, experts in found.items():
        count = 1 + max(e for e, _ in experts)
        for which, halves in (("gate_up", ("gate", "up")), ("down", ("down",))):
            order = [experts[e, h] for e in range(count) for h in halves]
            rows, columns = order[0].weight.shape
            if len({(t.weight.dtype, t.weight.shape) for t in order}) > 1:
                raise NextnError(
                    f"The experts of {at} differ in dtype or shape, so that they cannot be stacked.",
                    "Choose --experts split.",
                )
            parts = tuple(source.part(t.weight) for t in order)
            sources = tuple(t.weight.key for t in order)
            _expert(f"{at}.{which}", (count, rows * len(halves), columns), parts, sources, wanted, out)


def _expert(
    name: str,
    shape: tuple[int, ...],
    parts: tuple[Part, ...],
    sources: tuple[str, ...],
    wanted: Wanted,
    out: HeadPieces,
) -> None:
    key = wanted.family.key_of(name, prefix=wanted.prefix, layers=wanted.layers, experts=wanted.storage)
    _add(out, Piece(key, name, wanted.dtype(name, parts[0].dtype), shape, parts, sources))
    out.full.append(key)
