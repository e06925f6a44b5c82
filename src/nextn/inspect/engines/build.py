"""Set how an engine would build each module of the head against how it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nextn.inspect.case import Case
from nextn.inspect.engines.support import Support
from nextn.inspect.engines.table import FUSED_UNEXPANDED
from nextn.inspect.engines.versions import parse_version
from nextn.inspect.facts import architecture
from nextn.inspect.quant.claims import FUSED, HeadModule
from nextn.inspect.quant.scheme import Scheme
from nextn.inspect.quant.strict import Built, SplitError, exempt


@dataclass(frozen=True, slots=True)
class Clash:
    """A module that is not built as it is stored.

    Attributes:
        kind: ``random``: stored in full precision, built quantised; ``foreign``: stored quantised, built in full
            precision; ``split``: the lists divide a fused module.
        code: the finding that explains it.
        modules: checkpoint modules.
        runtime: the engine's name for it.
    """

    kind: Literal["random", "foreign", "split"]
    code: str
    modules: tuple[HeadModule, ...]
    runtime: str


def scheme_key(scheme: Scheme) -> str:
    """The engines' name of a scheme where it differs from the declaration's: ``modelopt_fp4``."""
    if scheme.method.startswith("modelopt"):
        return "modelopt_fp4" if "FP4" in (scheme.algorithm + scheme.method).upper() else "modelopt_fp8"
    return scheme.method


def clashes(case: Case, engine: str, support: Support, version: str) -> Iterator[Clash]:
    """The modules of the head that an engine version would build otherwise than they are stored."""
    for built, modules, full in _states(case, engine, support, version):
        if full is None:
            divided = len({case.claims.quantised(m) for m in modules}) == 2
            yield Clash("split", "quant-fused-split" if divided else "quant-runtime-name", modules, built.name)
            continue
        stored_full = tuple(m for m in modules if m.full)
        stored_quantised = tuple(m for m in modules if not m.full)
        if not full and stored_full:
            yield Clash("random", _why(case, stored_full[0]), stored_full, built.name)
        if full and stored_quantised:
            code = "quant-undeclared" if case.scheme is None else "head-quantised"
            yield Clash("foreign", code, stored_quantised, built.name)


def modules_built(case: Case, engine: str, support: Support, version: str) -> Iterator[tuple[HeadModule, bool]]:
    """Every module of the head that is built, and whether in full precision; those that lists divide are left out."""
    for _, modules, full in _states(case, engine, support, version):
        if full is not None:
            yield from ((m, full) for m in modules)


def _states(
    case: Case, engine: str, support: Support, version: str
) -> Iterator[tuple[Built, tuple[HeadModule, ...], bool | None]]:
    """Runtime modules, what they are made of, and whether they are built in full precision; None where lists divide."""
    scheme = case.scheme
    whole_full = scheme is not None and (scheme_key(scheme) in support.full or _special_full(engine, scheme, version))
    expands = not _unexpanded(case, engine, version)
    for built, modules in runtime_modules(case, support).items():
        if (
            scheme is None
            or whole_full
            or any(word in modules[0].module for word in support.plain)
            or (engine == "vllm" and _vllm_plain(case, scheme, modules[0]))
        ):
            yield built, modules, True
            continue
        try:
            yield built, modules, exempt(engine, scheme, built, expands=expands)
        except SplitError:
            yield built, modules, None


def runtime_modules(case: Case, support: Support) -> dict[Built, tuple[HeadModule, ...]]:
    """The head's modules under the names that the engine builds, fused ones together."""
    groups: dict[tuple[str, bool], list[HeadModule]] = {}
    for module in case.claims.head:
        name = runtime_name(case, support, module)
        if ".experts." in name:
            groups.setdefault((name[: name.index(".experts.") + len(".experts")], True), []).append(module)
            continue
        parent, _, part = name.rpartition(".")
        groups.setdefault((f"{parent}.{FUSED.get(part, part)}", False), []).append(module)
    built: dict[Built, tuple[HeadModule, ...]] = {}
    for (name, experts), modules in groups.items():
        if experts:
            parts = tuple(f"{name}.0.{p}_proj" for p in ("gate", "up", "down"))
        elif len(modules) > 1:
            parts = tuple(runtime_name(case, support, m) for m in modules)
        else:
            parts = ()
        built[Built(name, parts, experts)] = tuple(modules)
    return built


def runtime_name(case: Case, support: Support, module: HeadModule) -> str:
    name = module.module.removeprefix(case.facts.prefix)
    before, after = support.rename
    if before:
        number = case.facts.dims.get("layers", 0) + module.tensor.layer
        before = before.replace("{n}", str(number))
        if name.startswith(before):
            name = after + name[len(before) :]
    return name


def _unexpanded(case: Case, engine: str, version: str) -> bool:
    kinds = kinds_of(case)
    at = parse_version(version)
    return any(
        engine == name and at <= parse_version(until) and any(k in kinds for k in affected)
        for name, _, until, affected in FUSED_UNEXPANDED
    )


def kinds_of(case: Case) -> tuple[str, ...]:
    """What config.json calls the model: architectures and model types, nested ones too; ``gguf:ARCH`` for a GGUF.

    Where it calls it nothing, the names of the family.
    """
    if case.facts.checkpoint.kind == "gguf":
        return (f"gguf:{architecture(case.facts.checkpoint)}",)
    config, family = case.facts.checkpoint.config, case.facts.family
    names = config.get("architectures")
    found = [a for a in names if isinstance(a, str)] if isinstance(names, list) else []
    types = [
        holder["model_type"]
        for holder in (config, config.get("text_config"), config.get("llm_config"))
        if isinstance(holder, dict) and isinstance(holder.get("model_type"), str)
    ]
    if family is not None:
        found = found or list(family.architectures)
        types = types or list(family.model_types)
    return (*found, *types)


def _special_full(engine: str, scheme: Scheme, version: str) -> bool:
    """SGLang builds a Qwen3.5 head plain where Quark's list names the head's experts (``qwen3_5_mtp.py``).

    0.5.17 did so where it named anything of the head, and for all mixed-precision ModelOpt checkpoints.
    """
    if engine != "sglang":
        return False
    newer = parse_version(version) > (0, 5, 17)
    if scheme.method.startswith("modelopt") and "MIXED" in scheme.algorithm.upper():
        return not newer
    if not scheme.method.startswith("quark"):
        return False
    named = [r.text for r in scheme.rules if r.exempts and r.text.startswith("mtp.")]
    return any("mlp.experts" in text for text in named) if newer else bool(named)


def _vllm_plain(case: Case, scheme: Scheme, module: HeadModule) -> bool:
    """vLLM's exceptions for Qwen heads: ``fc`` under NVFP4, and the layers where GPTQ exempts anything named mtp."""
    if not module.module.removeprefix(case.facts.prefix).startswith("mtp."):
        return False
    if scheme_key(scheme) == "modelopt_fp4":
        return module.module.endswith("mtp.fc")
    family = case.facts.family.name if case.facts.family else ""
    if family.startswith("qwen3_5") and ".layers." in module.module:
        return any(r.text.startswith("-:") and "mtp" in r.text for r in scheme.rules)
    return False


def _why(case: Case, module: HeadModule) -> str:
    """The finding that explains why a full-precision module would be built quantised."""
    if case.claims.quantised(module):
        missed = any(rule.matches_normalised(n) for rule, _ in case.claims.missed for n in module.aliases)
        return "prefix-mismatch" if missed else "quant-unlisted"
    return "quant-listed-unfused" if case.claims.listed_unfused(module) else "quant-runtime-name"
