"""Plan a merge: a base's own shards as they are, the head in a shard of its own, index and configs to match.

The one exception to "as they are": engines read every key of a file that the index names, listed or not, so a shard
that holds old head tensors beside the target's is written anew without them, and one that holds nothing else is left
out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nextn.checkpoint.draft_ids import DRAFT_IDS, draft_ids
from nextn.checkpoint.header import read_header
from nextn.checkpoint.source import INDEX_NAME, Checkpoint
from nextn.errors import NextnError
from nextn.families.contract import Family, join
from nextn.inspect.facts import Facts, gather
from nextn.inspect.quant.read import read_schemes
from nextn.inspect.quant.stored import WEIGHT_PARTS, form, split_key
from nextn.inspect.rules.words import plural
from nextn.surgery import base as about_base
from nextn.surgery.check import few, require_family, require_fit, require_whole
from nextn.surgery.exempt import exempt
from nextn.surgery.extract import QUANT_FILE
from nextn.surgery.names import LAYER, fused_with, head_names
from nextn.surgery.pieces import HeadPieces, Wanted, head_pieces, in_model_tree
from nextn.surgery.plan import Edit, Link, LinkMode, Part, Piece, Plan, Shard, Text, piece_bytes
from nextn.surgery.result import judged, listed
from nextn.surgery.settings import (
    edits,
    is_quantised,
    method,
    to_index,
    to_text,
    unquantised_modules,
    with_count,
    with_exemption,
    with_head_fields,
    with_padding,
)
from nextn.surgery.stream import in_file_order

HEAD_FILE = "model-mtp.safetensors"
SMALL_BYTES = 64 << 20
"""Files that are not weights are copied below this size, so that editing them in OUT never edits the base."""
DTYPES = {"bf16": "BF16", "bfloat16": "BF16", "fp16": "F16", "float16": "F16", "fp32": "F32", "float32": "F32"}


@dataclass(frozen=True)
class MergeOptions:
    """What the user may choose; see `nextn merge --help`."""

    link: LinkMode = "hard"
    replace: bool = False
    dtype: str = "auto"
    experts: str = "auto"
    engine: str | None = None
    in_place: bool = False


def plan_merge(base: Checkpoint, head: Checkpoint, out: Path, options: MergeOptions) -> Plan:
    """What `nextn merge` would do; nothing is written.

    Raises:
        NextnError: the base cannot be used, the head does not belong, or an option does not fit.
    """
    about_base.require_usable(base)
    assert base.root is not None
    root = base.root
    if not options.in_place:
        _refuse_inside(root, out)
    family = require_family(gather(base))
    padded = with_padding(family, base.config, head.config) if family.padded_lists and head.config else base.config
    facts = gather(replace(base, config=padded))
    head_facts = gather(head if head.config else replace(head, config=base.config))
    require_family(head_facts)
    require_whole(head_facts)
    require_fit(head_facts, facts)
    old = about_base.old_head(facts)
    if (facts.head or facts.foreign or facts.unexpected) and not options.replace:
        raise about_base.explain_present(facts, old)
    layers = facts.dims.get("layers", 0)
    about_base.require_trunk(base, old, family, layers)

    beside = base.json(QUANT_FILE)
    wanted = _wanted(facts, head_facts, old, options)
    parts = head_pieces(head_facts, wanted)
    pieces = in_file_order(parts.pieces)
    taken = _files(base, old, options)
    index = _index(base, old, taken, pieces)
    depth = max(head_facts.layers, default=0) + 1
    config = with_head_fields(with_count(family, padded, depth), head.config)
    config = with_count(family, config, depth)
    quant = beside
    if is_quantised(config) or method(config, beside):
        config, quant = _exempted(config, beside, base, old, family, parts, pieces, layers)
    texts, changed = _texts(base, config, quant, index)
    texts = (*_draft_ids(head, facts.dims.get("vocab", 0)), *texts)
    plan = Plan(
        action="merge",
        out=out,
        family=family.name,
        facts={
            "base": base.source,
            "head": head.source,
            "layers": depth,
            "tensors": len(pieces),
            "bytes": sum(piece_bytes(p) for p in pieces),
            "experts": wanted.storage if head_facts.stacked is not None else None,
            "replaces": len(old),
            "quantization": method(base.config, beside) or None,
        },
        links=() if options.in_place else (*taken.links, *_companions(root, base, options)),
        rewritten=taken.rewritten,
        dropped=taken.dropped | _stale_ids(base, head),
        shards=(*taken.shards, Shard(taken.head_file, pieces, {"format": "pt"})),
        texts=texts,
        edits=changed,
        renamed=parts.renamed,
        left_out=parts.left_out,
        notes=_notes(base, facts, old, taken, options),
        moved={a: b for a, b in taken.names.items() if a != b} if options.in_place else {},
    )
    verdicts = judged(listed(plan, base, taken.names), base, plan.head, options.engine)
    return replace(plan, notes=(*plan.notes, *verdicts))


def _refuse_inside(root: Path, out: Path) -> None:
    here, there = root.resolve(), out.absolute().parent.resolve() / out.name
    if there == here or here in there.parents:
        raise NextnError(f"{out} lies inside the base, which a merge does not change.", "Name a folder outside it.")


def _wanted(base: Facts, head: Facts, old: frozenset[str], options: MergeOptions) -> Wanted:
    family, checkpoint = require_family(base), base.checkpoint
    main, by_end = about_base.own_dtypes(checkpoint, old, family)
    if options.dtype != "auto" and options.dtype not in DTYPES:
        raise NextnError(f"{options.dtype!r} is no dtype for a head.", "Choose auto, bf16, fp16 or fp32.")
    storage = about_base.expert_storage(
        options.experts, options.engine, family, about_base.own_storage(checkpoint, old), head.stacked
    )
    prefix = _prefix(checkpoint, family)
    layers = base.dims.get("layers", 0)

    def dtype(name: str, stored: str) -> str:
        if options.dtype != "auto":
            return DTYPES[options.dtype]
        key = family.key_of(name, layers=layers, experts=storage)
        match = LAYER.match(key)
        return by_end.get(key[match.end() :], main) if match else main

    return Wanted(
        family=family,
        dims=base.dims,
        layers=layers,
        prefix=prefix,
        storage=storage,
        dtype=dtype,
        keep_quantised=_keeping(checkpoint, head.checkpoint),
    )


def _prefix(base: Checkpoint, family: Family) -> str:
    """What goes before the head's keys: that of the base's own layers, for a head that stands in the same tree."""
    if not in_model_tree(family):
        return ""
    starts = {m[0] for m in map(LAYER.match, base.tensors) if m and m["n"] == "0"}
    longest_first = sorted(family.prefixes, key=len, reverse=True)
    return next((p for p in longest_first if join(p, "model.layers.0.") in starts), "")


def _keeping(base: Checkpoint, head: Checkpoint) -> Callable[[str], bool]:
    """Whether a quantised head module stays so: the scheme is the base's, whose lists exempt no part of it."""
    if not _same_scheme(base, head):
        return lambda module: False
    schemes = read_schemes(base)
    return lambda module: all(s.claims_quantised(name) for s in schemes for name in fused_with(module))


def _same_scheme(base: Checkpoint, head: Checkpoint) -> bool:
    """Whether quantised head tensors mean the same in both checkpoints."""
    mine, theirs = method(base.config, base.json(QUANT_FILE)), method(head.config, head.json(QUANT_FILE))
    if not mine or mine != theirs:
        return False
    block = ("weight_block_size", "format", "bits", "group_size", "quant_algo")
    a, b = base.config.get("quantization_config") or {}, head.config.get("quantization_config") or {}
    return all(a.get(f) == b.get(f) for f in block)


@dataclass(frozen=True)
class _Taken:
    """What becomes of the base's weight files. `names`: base file -> file in the result."""

    links: tuple[Link, ...]
    shards: tuple[Shard, ...]
    rewritten: dict[str, tuple[str, ...]]
    dropped: dict[str, str]
    names: dict[str, str]
    head_file: str


def _files(base: Checkpoint, old: frozenset[str], options: MergeOptions) -> _Taken:
    assert base.root is not None
    held: dict[str, list[str]] = {name: [] for name in base.files}
    for key, info in base.tensors.items():
        for name in base.duplicates.get(key, (info.file,)):
            held[name].append(key)
    links: list[Link] = []
    shards: list[Shard] = []
    rewritten: dict[str, tuple[str, ...]] = {}
    dropped: dict[str, str] = {}
    names: dict[str, str] = {}
    for name in base.files:
        path = base.root / name
        leaving = tuple(k for k in held[name] if k in old)
        if leaving and len(leaving) == len(held[name]):
            dropped[name] = "holds nothing but the old head"
            continue
        names[name] = name
        if leaving:
            rewritten[name] = leaving
            tensors, metadata = read_header(path, name)
            kept = sorted((t for t in tensors.values() if t.key not in old), key=lambda t: t.start)
            pieces = tuple(
                Piece(t.key, t.key, t.dtype, t.shape, (Part(path, t.start, t.nbytes, t.dtype),), (t.key,)) for t in kept
            )
            shards.append(Shard(name, pieces, metadata))
        else:
            links.append(Link(path.resolve(), name, options.link, path.stat().st_size))
    head_file = _free_name({*base.files, *base.absent_files} if options.in_place else set(names))
    # A loader that finds model.safetensors reads no index; as one of two shards it is found through it.
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    here = {*base.files, *base.absent_files} if options.in_place else set()
    if names == {"model.safetensors": "model.safetensors"} and not here & {first, second}:
        names, head_file = {"model.safetensors": first}, second
        links = [replace(link, file=first) for link in links]
        shards = [replace(shard, file=first) for shard in shards]
    return _Taken(tuple(links), tuple(shards), rewritten, dropped, names, head_file)


def _free_name(taken: set[str]) -> str:
    name, number = HEAD_FILE, 1
    while name in taken:
        number += 1
        name = HEAD_FILE.replace(".safetensors", f"-{number}.safetensors")
    return name


def _index(base: Checkpoint, old: frozenset[str], taken: _Taken, pieces: tuple[Piece, ...]) -> dict[str, Any]:
    listed = base.index if base.index is not None else {k: t.file for k, t in base.tensors.items()}
    weight_map = {
        k: taken.names[f] for k, f in listed.items() if k not in old and k in base.tensors and f in taken.names
    }
    metadata: dict[str, Any] = {}
    raw = base.json(INDEX_NAME)
    if raw is not None and isinstance(raw.get("metadata"), dict):
        metadata = {k: v for k, v in raw["metadata"].items() if k != "total_parameters"}
    total = sum(base.tensors[k].nbytes for k in weight_map) + sum(piece_bytes(p) for p in pieces)
    weight_map |= {p.key: taken.head_file for p in pieces}
    return to_index(weight_map, metadata, total)


def _exempted(
    config: dict[str, Any],
    beside: dict[str, Any] | None,
    base: Checkpoint,
    old: frozenset[str],
    family: Family,
    parts: HeadPieces,
    pieces: tuple[Piece, ...],
    layers: int,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    full = set(parts.full)
    names = head_names(
        family,
        {p.key: p.shape for p in pieces if p.key in full},
        parts.quantised,
        layers,
        output_head_full=_output_head_full(base, old),
    )
    if not names.modules:
        return config, beside
    unquantised = unquantised_modules((t.key, t.dtype, len(t.shape)) for k, t in base.tensors.items() if k not in old)
    config = with_exemption(config, names, unquantised)
    return config, exempt(beside, names, unquantised) if beside and beside.get("quantization") else beside


def _output_head_full(base: Checkpoint, old: frozenset[str]) -> bool:
    """Whether the base keeps its output head in full precision; a tied one is the embedding, which is."""
    parts = {split_key(k) for k in base.tensors if k not in old and "lm_head" in k}
    stored = [form(base.tensors[f"{m}.{p}"], p) for m, p in parts if p in WEIGHT_PARTS and f"{m}.{p}" in base.tensors]
    return all(f == "full" for f in stored)


def _texts(
    base: Checkpoint, config: dict[str, Any], quant: dict[str, Any] | None, index: dict[str, Any]
) -> tuple[tuple[Text, ...], tuple[Edit, ...]]:
    assert base.root is not None
    texts: list[Text] = []
    changed: list[Edit] = []
    for file, before, after in (
        (QUANT_FILE, base.json(QUANT_FILE), quant),
        ("config.json", base.config, config),
    ):
        if after is None:
            continue
        changed += edits(file, before, after)
        raw = Text(file, (base.root / file).read_bytes()) if after == before else to_text(file, after)
        texts.append(raw)
    return (*texts, to_text(INDEX_NAME, index)), tuple(changed)


def _draft_ids(head: Checkpoint, vocab: int) -> tuple[Text, ...]:
    """The list of ids that a head drafts goes with the head."""
    ids = draft_ids(head)
    if ids is None:
        return ()
    if ids[-1] >= vocab:
        raise NextnError(
            f"{DRAFT_IDS} of the head names id {ids[-1]}, and the base has {vocab}.", "Take a head of this model."
        )
    return (to_text(DRAFT_IDS, {"ids": ids}),)


def _stale_ids(base: Checkpoint, head: Checkpoint) -> dict[str, str]:
    assert base.root is not None
    stale = (base.root / DRAFT_IDS).is_file() and draft_ids(head) is None
    return {DRAFT_IDS: "lists the ids of the old head"} if stale else {}


def _companions(root: Path, base: Checkpoint, options: MergeOptions) -> tuple[Link, ...]:
    """Tokenizer, templates, code and whatever else lies in the base, hidden files aside.

    A link to a folder becomes a link to the same folder.
    """
    ours = {*base.files, "config.json", INDEX_NAME, QUANT_FILE, DRAFT_IDS}
    links: list[Link] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for path in (Path(folder) / f for f in folders):
            if path.is_symlink():
                links.append(Link(path.resolve(), path.relative_to(root).as_posix(), "symlink", 0))
        for file in sorted(files):
            path = Path(folder) / file
            name = path.relative_to(root).as_posix()
            if name in ours or file.startswith(".") or not path.is_file():
                continue
            nbytes = path.stat().st_size
            links.append(Link(path.resolve(), name, "copy" if nbytes < SMALL_BYTES else options.link, nbytes))
    return tuple(links)


def _notes(
    base: Checkpoint, facts: Facts, old: frozenset[str], taken: _Taken, options: MergeOptions
) -> tuple[str, ...]:
    notes: list[str] = []
    leftovers = [k for k in old if k in facts.orphans]
    if leftovers and not facts.head:
        notes.append(f"{len(leftovers)} scales without weights are left out ({sorted(leftovers)[0]}).")
    if facts.unexpected:
        notes.append(
            f"{plural(len(facts.unexpected), 'tensor')} under the head's names that the family does not know"
            f" {'is' if len(facts.unexpected) == 1 else 'are'} left out ({few(facts.unexpected)})."
        )
    if taken.rewritten:
        notes.append(
            "Engines read every key of a file that they open, so shards that hold old head tensors are written anew."
        )
    if "model.safetensors" in taken.names.values():
        notes.append("Loaders that look for model.safetensors first, such as transformers', do not read the index.")
    hidden = [] if options.in_place or base.root is None else sorted(p.name for p in base.root.glob(".*"))
    if hidden:
        notes.append(f"Hidden files and folders are not taken over: {few(hidden)}.")
    if base.unindexed_files:
        notes.append(
            f"{len(base.unindexed_files)} weight files that the index does not name are taken over as they are."
        )
    return tuple(notes)
