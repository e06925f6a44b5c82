"""The names under which engines ask a quantisation list about a head's modules.

A list in a checkpoint speaks of checkpoint modules; an engine asks with the names of its own modules, some of them
fused, some under another prefix. Sources: SGLang 0.5.23 ``layers/quantization/*`` and ``models/*nextn*.py``,
vLLM 0.33.0 ``quantization/utils/quant_utils.py``, ``models/*mtp*.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nextn.families.contract import Family
from nextn.inspect.quant.stored import split_key

FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")),
)
EXPERT = re.compile(r"(?P<container>.+\.experts)\.(?:\d+\..+|[a-z_]+_proj)")
LAYER = re.compile(r"(?P<before>(?:.+\.)?layers\.)(?P<n>\d+)\.")

DECODER_IN_SGLANG = ("model.decoder", "model.eh_proj")
"""Where SGLang's DeepSeek and GLM heads build the layer that the checkpoint calls ``model.layers.N``."""

OUTPUT_HEAD_IN_SGLANG = "model.shared_head.head"
"""The target's output head in SGLang's ``glm4_moe_nextn``, ``glm_ocr_nextn``, ``deepseek_nextn`` and
``qwen3_next_mtp``."""


@dataclass(frozen=True)
class HeadNames:
    """The modules of a head that a list must name.

    Attributes:
        modules: checkpoint modules of matrices in full precision, routed experts by their container.
        fused: the names under which engines fuse some of them.
        roots: what every module of the head starts with, e.g. ``mtp`` or ``model.layers.61``.
        whole: no module of the head is quantised, so that a root may stand for all.
    """

    modules: tuple[str, ...]
    fused: tuple[str, ...]
    roots: tuple[str, ...]
    whole: bool

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.modules, *self.fused)


def head_names(
    family: Family,
    shapes: Mapping[str, Sequence[int]],
    quantised: Iterable[str],
    layers: int,
    *,
    output_head_full: bool = False,
) -> HeadNames:
    """Names for the exemption of a head.

    Args:
        shapes: checkpoint key -> shape of every head weight in full precision.
        quantised: keys of head weights that stay quantised.
        layers: the base's num_hidden_layers.
        output_head_full: the base's output head, which the head shares, is in full precision.
    """
    modules: list[str] = []
    roots: list[str] = []
    for key, shape in shapes.items():
        module = split_key(key)[0]
        root = root_of(module, layers)
        if root not in roots:
            roots.append(root)
        if len(shape) < 2:
            continue
        expert = EXPERT.fullmatch(module)
        module = expert["container"] if expert else module
        if module not in modules:
            modules.append(module)
    modules.sort()
    aliases = [a for m in modules for a in _decoder_names(family, m, layers)]
    if aliases:
        roots += [r for r in DECODER_IN_SGLANG if r not in roots]
    if output_head_full and modules and (aliases or family.name == "qwen3_next"):
        aliases.append(OUTPUT_HEAD_IN_SGLANG)
        roots.append(OUTPUT_HEAD_IN_SGLANG)
    fused = [name for m in (*modules, *aliases) for name in _fused(m, (*modules, *aliases))]
    return HeadNames(
        tuple(dict.fromkeys((*modules, *aliases))), tuple(dict.fromkeys(fused)), tuple(roots), not list(quantised)
    )


def fused_with(module: str) -> tuple[str, ...]:
    """A module and those that engines build as one with it: q/k/v, gate/up, and all three of a routed expert."""
    parent, _, last = module.rpartition(".")
    if ".experts." in module and last in ("gate_proj", "up_proj", "down_proj"):
        return tuple(f"{parent}.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
    return next((tuple(f"{parent}.{s}" for s in shards) for _, shards in FUSED if last in shards), (module,))


def root_of(module: str, layers: int) -> str:
    """The shortest prefix of a module that only the head has."""
    match = LAYER.match(module + ".")
    if match and int(match["n"]) >= layers and "mtp" not in match["before"]:
        return f"{match['before']}{match['n']}"
    parts = module.split(".")
    for at, part in enumerate(parts):
        if "mtp" in part or "nextn" in part:
            return ".".join(parts[: at + 1])
    return module


def _decoder_names(family: Family, module: str, layers: int) -> list[str]:
    match = LAYER.match(module)
    if match is None or not any("{n}" in s.key for s in family.head) or int(match["n"]) < layers:
        return []
    rest = module[match.end() :]
    return [f"model.{rest}"] if rest == "eh_proj" else [f"model.decoder.{rest}"]


def _fused(module: str, modules: Sequence[str]) -> list[str]:
    parent, _, last = module.rpartition(".")
    out = []
    for name, shards in FUSED:
        if last == shards[0] and all(f"{parent}.{s}" in modules for s in shards):
            out.append(f"{parent}.{name}")
    return out
