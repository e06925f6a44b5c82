"""Do files and index agree, and is every file there?"""

from __future__ import annotations

from collections.abc import Iterator

from nextn.inspect.case import Case
from nextn.inspect.findings import Finding
from nextn.inspect.rules.words import listing, plural

OTHER_FILES = ("consolidated", "adapter_", "optimizer", "scheduler")
"""How names of files begin that lie beside a checkpoint on purpose, outside its index: another format of the same
weights, adapters, a trainer's state."""


def shard_missing(case: Case) -> Iterator[Finding]:
    facts = case.facts
    absent = facts.checkpoint.absent_files
    if not absent:
        return
    lost = facts.missing_by_index
    part = f", among them {plural(len(lost), 'head tensor')}" if lost else ""
    keys = tuple(k for k, f in (facts.checkpoint.index or {}).items() if f in set(absent))
    yield Finding(
        "shard-missing",
        "error",
        f"The index names {plural(len(absent), 'file that is', 'files that are')} not there: {listing(absent)}. "
        f"{plural(len(keys), 'tensor')} should be in {'it' if len(absent) == 1 else 'them'}{part}.",
        "Download the missing files, or take them out of the index if they were left out on purpose.",
        keys,
    )


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
        f"Write the index anew: nextn merge {case.source} {case.source} OUT.",
        keys,
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
            f"Write the index anew: nextn merge {case.source} {case.source} OUT.",
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
        f"Write one copy: nextn merge {case.source} HEAD OUT replaces the old head.",
        keys,
    )


def file_unreadable(case: Case) -> Iterator[Finding]:
    broken = case.facts.checkpoint.unreadable
    for name, why in broken.items():
        yield Finding("file-unreadable", "error", f"{name}: {why}", f"Download {name} again.", ())


RULES = (file_unreadable, shard_missing, shard_unindexed, index_stale, key_duplicated)
