"""Names that look like a draft head, for checkpoints of families that have no contract."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

ROOT = re.compile(r"mtp(_\w+)?|nextn(_\w+)?|medusa(_\w+)?|eagle(_\w+)?|draft(_\w+)?|hydra(_\w+)?|multi_token\w*")
"""A module of this name is the root of a head."""
MEMBER = re.compile(r"eh_proj|enorm|hnorm|pre_fc_norm_(embedding|hidden)|token_layernorm|hidden_layernorm|chain_norm")
"""A module of this name is a part of a head, which is the module around it."""


def looks_like_head(keys: Iterable[str]) -> list[str]:
    """Groups of keys that look like a draft head, as prefixes in order of first appearance.

    ``looks_like_head(["model.layers.3.q.weight", "model.layers.4.eh_proj.weight", "mtp.fc.weight"])`` is
    ``["model.layers.4", "mtp"]``.
    """
    groups: dict[str, None] = {}
    for key in keys:
        parts = key.split(".")
        for at, part in enumerate(parts[:64]):
            if ROOT.fullmatch(part):
                groups[".".join(parts[: at + 1])] = None
                break
            if at and MEMBER.fullmatch(part):
                groups[".".join(parts[:at])] = None
                break
    return list(groups)


def keys_like_head(keys: Iterable[str]) -> tuple[str, ...]:
    """The keys inside the groups of `looks_like_head`, in order; of a key's parts the first 64 count."""
    listed = list(keys)
    groups = set(looks_like_head(listed))
    return tuple(key for key in listed if not groups.isdisjoint(_leading(key)))


def _leading(key: str) -> Iterator[str]:
    """A key's leading parts and the key: ``a.b.c`` -> ``a``, ``a.b``, ``a.b.c``."""
    parts = key.split(".", 64)
    return (".".join(parts[: at + 1]) for at in range(min(len(parts), 64)))
