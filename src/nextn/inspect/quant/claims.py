"""Set what the configuration claims against what the headers say, module by module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from nextn.inspect.facts import Facts, HeadTensor
from nextn.inspect.quant.scheme import Rule, Scheme, runs, strip_prefix
from nextn.inspect.quant.stored import WEIGHT_PARTS, form, split_key

NEVER_QUANTISED = (
    "norm", ".embed.", "router", "shared_gate", ".head.", "bias", "conv", "a_log", "dt_bias", ".index.", "streams",
    "out_mixer", "relative",
)  # fmt: skip
"""Words in canonical names of tensors that no engine builds quantised."""

PLAIN_FUSION = ("eh_proj", "input_proj", "mtp_linear_proj", "fc_embedding", "fc_hidden")
"""Fusion matrices that engines build as plain linear layers (SGLang ``*_nextn``, vLLM ``*_mtp``)."""

QUANTISED_FUSION_FAMILIES = ("nemotron", "bailing", "ling", "longcat", "deepseek_v4")
"""Families whose fusion matrix is built with the target's scheme all the same."""

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Projection in the checkpoint -> the fused module that engines build."""

EXPANDED_EVERYWHERE = ("modelopt", "fp8", "fbgemm", "mxfp4")
"""Methods for which every engine version that was read takes fused names apart, as far as entries are plain names."""

_LATER_EXPERT = re.compile(r"\.experts\.[1-9]\d*\.")


@dataclass(frozen=True, slots=True)
class HeadModule:
    """A linear layer of the head: module name in the checkpoint, and whether it is stored in full precision."""

    module: str
    tensor: HeadTensor

    @property
    def full(self) -> bool:
        return self.tensor.form == "full"

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names under which a list may speak of it: stacked experts also as the module that holds them."""
        if self.tensor.spec.experts != "grouped":
            return (self.module,)
        parent = self.module.rpartition(".")[0]
        part = "down_proj" if self.module.endswith("down_proj") else "gate_proj"
        return (self.module, parent, f"{parent}.0.{part}")


class Claims:
    """A scheme set against a checkpoint."""

    def __init__(self, facts: Facts, scheme: Scheme | None) -> None:
        self.facts = facts
        self.scheme = scheme

    @cached_property
    def head(self) -> tuple[HeadModule, ...]:
        """The head's linear layers that an engine may build quantised."""
        family = self.facts.family
        fused_plain = family is not None and not family.name.startswith(QUANTISED_FUSION_FAMILIES)
        return tuple(
            HeadModule(t.module, t)
            for t in self.facts.head.values()
            if len(t.spec.shape) > 1
            and not any(word in t.name for word in NEVER_QUANTISED)
            and not (fused_plain and any(word in t.key for word in PLAIN_FUSION))
        )

    @cached_property
    def stored(self) -> str:
        """How the head's matrices are stored: ``none`` of them quantised, ``full``, or ``mixed``."""
        kinds = {m.full for m in self.head} | {
            t.form == "full" for t in self.fusion if t.form != "full" or not self.head
        }
        return "mixed" if len(kinds) == 2 else "full" if kinds == {False} else "none"

    @cached_property
    def fusion(self) -> tuple[HeadTensor, ...]:
        """The head's fusion matrices, whether or not engines build them quantised."""
        return tuple(t for t in self.facts.head.values() if ".fuse" in t.name and len(t.spec.shape) > 1)

    def quantised(self, module: HeadModule, scheme: Scheme | None = None) -> bool:
        """Whether the declaration claims that a head module is quantised."""
        scheme = scheme or self.scheme
        return scheme is not None and all(scheme.claims_quantised(name) for name in module.aliases)

    def listed_unfused(self, module: HeadModule) -> bool:
        """Whether entries spare a projection under its own name only, so that its fused module is not spared."""
        scheme = self.scheme
        parent, _, part = module.module.rpartition(".")
        if scheme is None or part not in FUSED or ".experts" in module.module or scheme.method.startswith("quark"):
            return False
        if scheme.method.startswith(EXPANDED_EVERYWHERE) and any(
            r.kind == "name" for r in scheme.matching(module.module)
        ):
            return False
        return not self.quantised(module) and scheme.claims_quantised(f"{parent}.{FUSED[part]}")

    @cached_property
    def modules(self) -> dict[str, bool]:
        """All modules with a weight -> stored in full precision. Experts after the first, being alike, are left out."""
        found: dict[str, bool] = {}
        for key, info in self.facts.checkpoint.tensors.items():
            if ".experts." in key and _LATER_EXPERT.search(key):
                continue
            module, part = split_key(key)
            if part in WEIGHT_PARTS:
                found[module] = found.get(module, True) and form(info, part) == "full"
        return found

    @cached_property
    def matrices(self) -> tuple[str, ...]:
        """Modules whose weight has at least two dimensions, embeddings aside: what a scheme may quantise."""
        tensors = self.facts.checkpoint.tensors
        flat = {m for m in self.modules if (t := tensors.get(f"{m}.weight") or tensors.get(m)) and len(t.shape) < 2}
        return tuple(m for m in self.modules if m not in flat and "embed" not in m and "conv" not in m)

    @cached_property
    def _leading_names(self) -> frozenset[str]:
        """Every module name and every leading part of one: what an ``exact`` entry may be."""
        return frozenset(name for module in self.modules for name in _leading(module))

    @cached_property
    def _strict_names(self) -> frozenset[str]:
        """Every run of name parts of every module: what a ``name`` entry may be."""
        return frozenset(run for module in self.modules for run in runs(module))

    @cached_property
    def _bare_names(self) -> dict[str, str]:
        """Module name or any leading part of it, without the usual prefixes -> one such module."""
        bare: dict[str, str] = {}
        for module in self.modules:
            for name in _leading(strip_prefix(module)):
                bare.setdefault(name, module)
        return bare

    def alive(self, rule: Rule) -> bool:
        """Whether an entry names any module of the checkpoint as it stands."""
        pattern = rule.pattern.strip(".")
        if rule.kind in ("glob", "regex"):
            return any(rule.matches(m) for m in self.modules)
        if f"{pattern}.weight" in self.facts.checkpoint.tensors:
            return True
        if rule.kind == "prefix":
            return any(m.startswith(rule.pattern) for m in self.modules)
        return pattern in (self._leading_names if rule.kind == "exact" else self._strict_names)

    def alive_normalised(self, rule: Rule) -> str | None:
        """A module that an entry would name if prefixes did not count."""
        if rule.kind in ("glob", "regex"):
            return next((m for m in self.modules if rule.matches_normalised(m)), None)
        bare = strip_prefix(rule.pattern.strip("."))
        return self._bare_names.get(bare) if "." in bare else None

    def misses(self) -> Iterator[tuple[Rule, str]]:
        """Exempting entries that miss by their prefix alone, with a full-precision module that they mean."""
        if self.scheme is None:
            return
        for rule in self.scheme.exempting:
            if self.alive(rule):
                continue
            module = self.alive_normalised(rule)
            if module is not None and self.modules[module] and self.scheme.claims_quantised(module):
                yield rule, module

    @cached_property
    def missed(self) -> tuple[tuple[Rule, str], ...]:
        return tuple(self.misses())


def _leading(name: str) -> Iterator[str]:
    """A dotted name and all its leading parts: ``a.b.c``, ``a.b``, ``a``."""
    while name:
        yield name
        name = name.rpartition(".")[0]
