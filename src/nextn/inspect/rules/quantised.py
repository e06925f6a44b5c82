"""Do the quantisation claims hold for what the headers say?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from nextn.inspect.case import Case
from nextn.inspect.findings import Finding
from nextn.inspect.quant.claims import FUSED, HeadModule
from nextn.inspect.quant.scheme import Rule, strip_prefix
from nextn.inspect.quant.stored import SCALE_PARTS, WEIGHT_PARTS, split_key
from nextn.inspect.rules.words import listing, plural


def quant_unlisted(case: Case) -> Iterator[Finding]:
    scheme = case.scheme
    if scheme is None:
        return
    by_prefix = [rule for rule, _ in case.claims.missed]
    wrong = [
        m
        for m in case.claims.head
        if m.full
        and case.claims.quantised(m)
        and not any(rule.matches_normalised(name) for rule in by_prefix for name in m.aliases)
    ]
    if wrong:
        yield Finding(
            "quant-unlisted",
            "error",
            f"{scheme.file} ({scheme.method}{' ' + scheme.algorithm if scheme.algorithm else ''}) claims that "
            f"{plural(len(wrong), 'head tensor is', 'head tensors are')} quantised, but the header says "
            f"{wrong[0].tensor.weight.dtype}: {listing([m.module for m in wrong])}.",
            f"Add {exemption(case, [m.module for m in wrong])} to {scheme.file}, or write a folder that has it",
            tuple(m.tensor.weight.key for m in wrong),
            case.rewrite(),
        )


def exemption(case: Case, modules: list[str]) -> str:
    """The list entry, in the scheme's own form, that exempts modules of the head."""
    assert case.scheme is not None
    method = case.scheme.method
    root = "mtp" if any(m.startswith("mtp.") or ".mtp." in m for m in modules) else modules[0].rpartition(".")[0]
    literal = root.replace(".", "\\.")
    if method.startswith("gptq"):
        return f'"dynamic": {{"-:.*{literal}.*": {{}}}}'
    if method.startswith("modelopt"):
        key = "ignore" if case.scheme.file == "config.json" else "exclude_modules"
        return f'"{key}": ["{root}*"]'
    if method == "compressed-tensors":
        return f'"ignore": ["re:.*{literal}.*"]'
    if method == "quark":
        return f'"exclude": ["re:.*{literal}.*"]'
    if method.startswith("auto"):
        return f'"extra_config": {{".*{literal}.*": {{"bits": 16, "data_type": "float"}}}}'
    if method == "bitsandbytes":
        return f'"llm_int8_skip_modules": ["{root}"]'
    return f'"modules_to_not_convert": {json.dumps(entries(modules))}'


def entries(modules: Sequence[str]) -> list[str]:
    """Names for a plain list, in the modules' order: routed experts as the one module that holds them."""
    return list(dict.fromkeys(m[: m.index(".experts.") + len(".experts")] if ".experts." in m else m for m in modules))


def quant_listed_unfused(case: Case) -> Iterator[Finding]:
    scheme = case.scheme
    if scheme is None:
        return
    unfused = [m for m in case.claims.head if m.full and case.claims.listed_unfused(m)]
    named = [m.module for m in unfused]
    if named:
        fused_names = sorted({f"{m.rpartition('.')[0]}.{FUSED[m.rpartition('.')[2]]}" for m in named})
        yield Finding(
            "quant-listed-unfused",
            "warning",
            f"{scheme.file} exempts {plural(len(named), 'projection')} of the head one by one ({listing(named)}); "
            f"engines build {listing(fused_names)}, and a version that does not expand the fused name misses them.",
            f"Add {exemption(case, named)} to {scheme.file}, or write a folder that has it",
            tuple(m.tensor.weight.key for m in unfused),
            case.rewrite(),
        )


def quant_fused_split(case: Case) -> Iterator[Finding]:
    """Parts of one fused module of which the list exempts some and not others."""
    scheme = case.scheme
    if scheme is None:
        return
    groups: dict[str, dict[HeadModule, bool]] = {}
    for module in case.claims.head:
        parent, _, part = module.module.rpartition(".")
        if ".experts." in module.module:
            together = module.module[: module.module.index(".experts.") + len(".experts")]
            groups.setdefault(together, {})[module] = case.claims.quantised(module)
        elif part in FUSED:
            groups.setdefault(f"{parent}.{FUSED[part]}", {})[module] = case.claims.quantised(module)
    for fused, parts in groups.items():
        if len(set(parts.values())) == 2:
            exempt = [m.module for m, q in parts.items() if not q]
            whole = all(m.full for m in parts)
            other = exemption(case, [m.module for m, q in parts.items() if q])
            advice = (
                f"Exempt the others too: add {other} to {scheme.file}, or write a folder that does"
                if whole
                else f"Take {json.dumps(exempt)} out of {scheme.file}, or put a head of one kind in its place"
            )
            yield Finding(
                "quant-fused-split",
                "error",
                f"{scheme.file} exempts {listing(exempt)} but not the other parts of {fused}, "
                "which engines build as one module; they refuse to load it.",
                advice,
                tuple(m.tensor.weight.key for m in parts),
                case.rewrite() if whole else case.take_from("BASE"),
            )


def quant_exempt_quantised(case: Case) -> Iterator[Finding]:
    scheme = case.scheme
    if scheme is None:
        return
    wrong = [m for m in case.claims.head if not m.full and not case.claims.quantised(m)]
    if wrong:
        names = [m.module for m in wrong]
        matching = (r for m in wrong for name in m.aliases for r in scheme.matching(name) if r.exempts)
        guilty = list(dict.fromkeys(r.text for r in matching))
        yield Finding(
            "quant-exempt-quantised",
            "error",
            f"{scheme.file} says that {plural(len(wrong), 'head tensor is', 'head tensors are')} not quantised, "
            f"but the header says {wrong[0].tensor.weight.dtype}: {listing(names)}.",
            f"Take {json.dumps(guilty)} out of {scheme.file}."
            if guilty
            else f"Name these modules among those that {scheme.file} quantises: {json.dumps(entries(names))}.",
            tuple(m.tensor.weight.key for m in wrong),
        )


def quant_undeclared(case: Case) -> Iterator[Finding]:
    quantised = [m for m in case.claims.head if not m.full]
    if quantised and case.scheme is None and not case.is_gguf:
        yield Finding(
            "quant-undeclared",
            "error",
            f"{plural(len(quantised), 'head tensor is', 'head tensors are')} stored quantised "
            f"({quantised[0].tensor.weight.dtype}), but no quantisation is declared anywhere.",
            "Restore quantization_config in config.json from the model that the head was taken from, or put a "
            "full-precision head in its place",
            tuple(m.tensor.weight.key for m in quantised),
            case.take_from("HEAD"),
        )


def quant_config_conflict(case: Case) -> Iterator[Finding]:
    if len(case.schemes) < 2:
        return
    first = case.schemes[0]
    weights = {split_key(k)[0]: k for k in case.facts.checkpoint.tensors if split_key(k)[1] in WEIGHT_PARTS}
    for other in case.schemes[1:]:
        if first.algorithm and other.algorithm and first.algorithm.upper() != other.algorithm.upper():
            yield Finding(
                "quant-config-conflict",
                "warning",
                f"{first.file} declares {first.algorithm}, {other.file} declares {other.algorithm}; engines read "
                f"{first.file} first.",
                f"Delete the file that is not true; if that is {other.file}",
                (),
                _delete(case, other.file),
            )
            continue
        differ = [m for m in case.claims.matrices if first.claims_quantised(m) != other.claims_quantised(m)]
        if differ:
            only = [m for m in differ if first.claims_quantised(m)]
            said = f"{other.file} alone exempts" if only else f"{first.file} alone exempts"
            yield Finding(
                "quant-config-conflict",
                "warning",
                f"{first.file} and {other.file} disagree on {plural(len(differ), 'module')}: {said} "
                f"{listing(only or differ)}. Engines read {first.file} first.",
                f"Delete the file that is not true; if that is {other.file}",
                tuple(weights.get(m, m) for m in differ),
                _delete(case, other.file),
            )


def _delete(case: Case, file: str) -> str:
    return "" if case.is_remote else f"rm {shlex.quote(str(Path(case.place) / file))}"


def prefix_mismatch(case: Case) -> Iterator[Finding]:
    missed = case.claims.missed
    if missed:
        rule, module = missed[0]
        weights = {split_key(k)[0]: k for k in case.facts.checkpoint.tensors if split_key(k)[1] in WEIGHT_PARTS}
        swaps = {r.text: _renamed(r, m) for r, m in missed}
        own = {m.module for m in case.claims.head}
        head = next((m for _, m in missed if m in own), None)
        yield Finding(
            "prefix-mismatch",
            "warning",
            f"In {rule.where}, {plural(len(missed), 'entry names', 'entries name')} no tensor as written, "
            f"only under another prefix: {rule.text!r} means {module}, which is in full precision.",
            f"In {rule.where}, write {json.dumps(swaps)}"
            + ("." if head is None else ", or write a folder that exempts the head"),
            tuple(dict.fromkeys(weights.get(m, m) for _, m in missed)),
            case.rewrite() if head is not None else "",
        )


def _renamed(rule: Rule, module: str) -> str:
    """An entry under the prefix that the files have: ``model.layers.0.x`` for ``model.language_model.layers.0.x``."""
    if rule.kind in ("glob", "regex"):
        return module
    bare = strip_prefix(module)
    return module[: len(module) - len(bare)] + strip_prefix(rule.text)


def quant_rule_invalid(case: Case) -> Iterator[Finding]:
    for scheme in case.schemes:
        if scheme.invalid:
            yield Finding(
                "quant-rule-invalid",
                "warning",
                f"{scheme.file} holds {plural(len(scheme.invalid), 'pattern')} that cannot be evaluated: "
                f"{listing([p[:60] for p in scheme.invalid])}.",
                f"In {scheme.file}, write valid expressions with at most five repetitions, none nested, in place of "
                f"{json.dumps([p[:400] for p in scheme.invalid])}.",
            )


def scales_stale(case: Case) -> Iterator[Finding]:
    facts = case.facts
    stale = [s.key for t in facts.head.values() if t.form == "full" for s in t.scales]
    if stale or facts.orphans:
        keys = (*stale, *facts.orphans)
        beside = "beside full-precision weights" if stale else "without weights"
        yield Finding(
            "scales-stale",
            "error",
            f"The head holds {plural(len(keys), 'scale')} {beside}, left over from a quantised head: {listing(keys)}.",
            "Write a folder without them" if facts.complete else "Take the whole head from the base model",
            keys,
            case.rewrite(),
        )


def scales_missing(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if case.is_gguf:
        return
    bare = [t.weight.key for t in facts.head.values() if t.form != "full" and not _scaled(t.scales)]
    if bare:
        yield Finding(
            "scales-missing",
            "error",
            f"{plural(len(bare), 'head tensor is', 'head tensors are')} quantised, but no scale is stored beside "
            f"{'it' if len(bare) == 1 else 'them'}: {listing(bare)}.",
            "Take the whole head, scales included, from its source",
            tuple(bare),
            case.take_from("HEAD"),
        )


def _scaled(beside: tuple[object, ...]) -> bool:
    return any(split_key(s.key)[1] in SCALE_PARTS for s in beside)  # type: ignore[attr-defined]


def head_quantised(case: Case) -> Iterator[Finding]:
    quantised = [m for m in case.claims.head if not m.full]
    if quantised:
        forms = sorted({m.tensor.form for m in quantised})
        yield Finding(
            "head-quantised",
            "info",
            f"The head itself is stored quantised ({', '.join(forms)}): "
            f"{len(quantised)} of {plural(len(case.claims.head), 'matrix', 'matrices')}.",
            "Nothing to do where the engine reads it; a full-precision head usually accepts better.",
            tuple(m.tensor.weight.key for m in quantised),
        )


RULES = (
    quant_unlisted,
    quant_fused_split,
    quant_exempt_quantised,
    quant_undeclared,
    scales_stale,
    scales_missing,
    quant_listed_unfused,
    quant_config_conflict,
    prefix_mismatch,
    quant_rule_invalid,
    head_quantised,
)
