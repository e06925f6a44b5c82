"""Do files and index agree, and is every file there?"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from nextn.checkpoint.source import INDEX_NAME
from nextn.inspect.case import Case
from nextn.inspect.findings import Finding
from nextn.inspect.quant.stored import split_key
from nextn.inspect.rules.words import listing, plural

OTHER_FILES = ("consolidated", "adapter_", "optimizer", "scheduler")
"""How names of files begin that lie beside a checkpoint on purpose, outside its index: another format of the same
weights, adapters, a trainer's state."""


def shard_missing(case: Case) -> Iterator[Finding]:
    facts = case.facts
    absent = tuple(f for f in facts.checkpoint.absent_files if f not in facts.checkpoint.unreadable)
    if not absent:
        return
    gone = {split_key(k)[0] for k, f in (facts.checkpoint.index or {}).items() if f in absent}
    lost = [k for k in facts.missing_by_index if split_key(k)[0] in gone]
    part = f", among them {plural(len(lost), 'head tensor')}" if lost else ""
    keys = tuple(k for k, f in (facts.checkpoint.index or {}).items() if f in set(absent))
    named = "The numbering of the files" if case.is_gguf else "The index"
    should = (
        f" {plural(len(keys), 'tensor')} should be in {'it' if len(absent) == 1 else 'them'}{part}." if keys else ""
    )
    yield Finding(
        "shard-missing",
        "error",
        f"{named} names {plural(len(absent), 'file that is', 'files that are')} not there: {listing(absent)}.{should}",
        *download(case, absent, keys),
    )


def download(case: Case, files: Sequence[str], keys: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...], str]:
    """Advice, tensors and command where files have to be fetched."""
    repo = "/".join(case.facts.checkpoint.source.split("/")[:2]) if case.is_remote else "REPO"
    if case.is_remote:
        return f"Have the publisher upload {listing(files)} to {repo}.", keys, ""
    folder = case.source if not case.is_gguf else shlex.quote(str(Path(case.place).parent))
    names = " ".join(shlex.quote(f) for f in files)
    command = f"hf download {repo} {names} --local-dir {folder}"
    return "Download what is missing or damaged from where it came", keys, command


def shard_unindexed(case: Case) -> Iterator[Finding]:
    facts = case.facts
    files = {f for f in facts.checkpoint.unindexed_files if not f.startswith(OTHER_FILES)}
    keys = tuple(k for k, t in facts.checkpoint.tensors.items() if t.file in files)
    if not keys:
        return
    heads = sum(t.weight.file in files for t in facts.head.values())
    part = f" ({plural(heads, 'of them a head tensor', 'of them head tensors')})" if heads else ""
    yield Finding(
        "shard-unindexed",
        "warning",
        f"The index does not name {listing(sorted(files))}, so engines do not read the "
        f"{plural(len(keys), 'tensor')} in {'it' if len(files) == 1 else 'them'}{part}.",
        "Write a folder whose index names them"
        if heads == len(keys)
        else f"Add their tensors to weight_map in {INDEX_NAME}, or move the files away if they do not belong here.",
        keys,
        case.rewrite() if heads == len(keys) else "",
    )


def index_stale(case: Case) -> Iterator[Finding]:
    """Entries of the index that the named file, which is there, does not hold."""
    checkpoint = case.facts.checkpoint
    stale = tuple(k for k in checkpoint.misplaced if k not in checkpoint.tensors)
    if stale:
        yield Finding(
            "index-stale",
            "warning",
            f"The index lists {plural(len(stale), 'tensor')} that the named files do not hold: {listing(stale)}.",
            f"Take these entries out of weight_map in {INDEX_NAME}, or download the files again.",
            stale,
        )


def key_duplicated(case: Case) -> Iterator[Finding]:
    facts = case.facts
    outside = set(facts.checkpoint.unindexed_files)
    doubled = {
        k: read for k, f in facts.checkpoint.duplicates.items() if len(read := [n for n in f if n not in outside]) > 1
    }
    if not doubled:
        return
    of_head = {t.weight.key for t in facts.head.values()} & set(doubled)
    keys = tuple(sorted(of_head)) or tuple(doubled)
    files = sorted({f for k in keys for f in doubled[k]})
    yield Finding(
        "key-duplicated",
        "warning",
        f"Several files ({listing(files)}) hold the same {plural(len(keys), 'head tensor' if of_head else 'tensor')}; "
        "engines read whole files, so which copy wins depends on their order.",
        "Write one copy of the head" if of_head else "Delete the file that does not belong here.",
        keys,
        case.rewrite() if of_head else "",
    )


def file_unreadable(case: Case) -> Iterator[Finding]:
    checkpoint = case.facts.checkpoint
    for name, why in checkpoint.unreadable.items():
        keys = tuple(k for k, f in (checkpoint.index or {}).items() if f == name)
        short = why.replace(str(checkpoint.root / name), name) if checkpoint.root is not None else why
        message = short if name in short else f"{name}: {short}"
        yield Finding("file-unreadable", "error", message, *download(case, [name], keys))


def weights_missing(case: Case) -> Iterator[Finding]:
    checkpoint = case.facts.checkpoint
    if not checkpoint.files and not checkpoint.absent_files and not checkpoint.unreadable:
        yield Finding(
            "weights-missing",
            "error",
            f"{checkpoint.source} holds config.json and no weights.",
            "Have the publisher upload them." if case.is_remote else "Download them",
            (),
            "" if case.is_remote else f"hf download REPO --local-dir {case.source}",
        )


RULES = (file_unreadable, weights_missing, shard_missing, shard_unindexed, index_stale, key_duplicated)
