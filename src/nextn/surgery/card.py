"""The card of an extracted head: what it is, from what, and by which hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from nextn import __version__
from nextn.inspect.facts import Facts
from nextn.surgery.plan import Hashes, Piece, Text


def card(facts: Facts, pieces: Sequence[Piece]) -> Text:
    """README.md of a head folder; the hashes are filled in when the tensors have been read."""
    return Text("README.md", lambda hashes: _text(facts, pieces, hashes).encode())


def combined(hashes: Mapping[str, str]) -> str:
    """One sha256 for a whole head: over the lines ``key sha256``, sorted."""
    return hashlib.sha256("".join(f"{k} {v}\n" for k, v in sorted(hashes.items())).encode()).hexdigest()


def _text(facts: Facts, pieces: Sequence[Piece], hashes: Hashes) -> str:
    family = facts.family
    assert family is not None
    source_of = {p.key: " + ".join(p.sources) for p in pieces}
    rows = "\n".join(
        f"| `{p.key}` | `{p.name}` | {p.dtype} | {' x '.join(map(str, p.shape)) or 'scalar'} | `{hashes[p.key]}` |"
        + ("" if source_of[p.key] == p.key else f" from `{source_of[p.key]}`")
        for p in sorted(pieces, key=lambda p: p.key)
    )
    name = facts.checkpoint.config.get("_name_or_path") or facts.checkpoint.source.rstrip("/").rsplit("/", 1)[-1]
    return f"""\
---
library_name: nextn
tags: [mtp, multi-token-prediction, speculative-decoding]
---

# MTP head of {name}

The multi-token-prediction head of a {family.title} checkpoint, without its target model.
It shares the target's token embedding and output head and is of no use alone.

- taken from: `{name}`, {len(pieces)} tensors
- sha256 of the head (over the lines `key sha256` below, sorted): `{combined(hashes)}`
- written by: nextn {__version__}

Put it into a checkpoint: `nextn merge BASE THIS_FOLDER OUT`.

| tensor | canonical name | dtype | shape | sha256 of the source's bytes |
|---|---|---|---|---|
{rows}
"""
