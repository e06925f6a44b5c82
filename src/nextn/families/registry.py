"""The families that nextn knows, in one explicit tuple, and the lookup by config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextn.families.contract import Family, lookup
from nextn.families.dense import LLAMA, QWEN2, QWEN3
from nextn.families.geometry import geometry, text_config, whole
from nextn.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

FAMILIES: tuple[Family, ...] = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, LLAMA, QWEN2, QWEN3)

GATED_Q = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_moe"})
"""Families whose q_proj carries the output gate (twice as wide)."""


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a config: by ``model_type`` (top, then nested), then by ``architectures``; None if unknown."""
    kinds = [config.get("model_type"), text_config(config).get("model_type")]
    for kind in kinds:
        for family in FAMILIES:
            if isinstance(kind, str) and kind in family.model_types:
                return family
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        for family in FAMILIES:
            if name in family.architectures:
                return family
    return None


def family_geometry(family: Family, config: Mapping[str, Any]) -> dict[str, int]:
    """The config's dimensions with what the family adds: gate width, biases the config does not spell out."""
    dims = geometry(config)
    dims["q_gate"] = 2 if family.name in GATED_Q else 1
    dims["o_bias"] = int(family.name == "llama")
    return dims


def declared_layers(family: Family, config: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """How many head layers the config declares, and at which path; (None, None) if it declares nothing.

    Raises:
        NextnError: the field holds something that is not a whole number.
    """
    for path in family.layer_count:
        value = lookup(config, path)
        if value is not None:
            return whole(value, path), path
    return None, None
