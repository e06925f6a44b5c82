"""The families that nextn knows, in one explicit tuple, and the lookup by config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextn.families.bailing import BAILING_HYBRID, BAILING_MOE_V2
from nextn.families.contract import Family, lookup
from nextn.families.deepseek import DEEPSEEK_V3
from nextn.families.deepseek_v4 import DEEPSEEK_V4
from nextn.families.dense import LLAMA, QWEN2, QWEN3
from nextn.families.ernie import ERNIE4_5_MOE
from nextn.families.exaone import EXAONE4_5, EXAONE_MOE
from nextn.families.geometry import geometry, text_config, whole
from nextn.families.glm import GLM4_MOE, GLM4_MOE_LITE, GLM5_NEXT, GLM_MOE_DSA, GLM_OCR
from nextn.families.hunyuan import HY_V3, HY_V4
from nextn.families.inkling import INKLING
from nextn.families.kimi import KIMI_K3
from nextn.families.longcat import LONGCAT_FLASH
from nextn.families.mimo import MIMO, MIMO_V2, MIMO_V2_FLASH
from nextn.families.minimax import MINIMAX_M2, MINIMAX_M3
from nextn.families.nemotron_h import NEMOTRON_H
from nextn.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from nextn.families.qwen4_exp import QWEN4_EXP
from nextn.families.step import STEP3P5, STEP3P7

FAMILIES: tuple[Family, ...] = (
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN4_EXP,
    EXAONE_MOE,
    EXAONE4_5,
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    GLM5_NEXT,
    GLM_OCR,
    MIMO,
    MIMO_V2_FLASH,
    MIMO_V2,
    NEMOTRON_H,
    STEP3P5,
    STEP3P7,
    ERNIE4_5_MOE,
    LONGCAT_FLASH,
    BAILING_HYBRID,
    BAILING_MOE_V2,
    HY_V3,
    HY_V4,
    MINIMAX_M2,
    MINIMAX_M3,
    KIMI_K3,
    INKLING,
    LLAMA,
    QWEN2,
    QWEN3,
)

MAX_HEAD_LAYERS = 4096


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
    dims.update(family.constants)
    if family.derive is not None:
        dims.update(family.derive(text_config(config)))
    return dims


def declared_layers(family: Family, config: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """How many head layers the config declares, and at which path; (None, None) if it declares nothing.

    Raises:
        NextnError: the field holds something that is not a whole number that a checkpoint can hold.
    """
    for path in family.layer_count:
        value = lookup(config, path)
        if value is not None:
            return whole(value, path, MAX_HEAD_LAYERS), path
    return None, None
