"""Names that look like a draft head, for checkpoints of families that have no contract."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
