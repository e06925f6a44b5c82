"""Findings that only an engine's way of building the head brings to light, and severities that depend on engines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from nextn.inspect.case import Case
from nextn.inspect.engines.build import clashes, kinds_of
from nextn.inspect.engines.supported import SUPPORT
from nextn.inspect.engines.table import ENGINE
from nextn.inspect.engines.verdict import Verdict
from nextn.inspect.findings import Finding
from nextn.inspect.quant.claims import HeadModule
from nextn.inspect.rules.words import plural, together

RAISED_WHERE_AN_ENGINE_FAILS = frozenset(
    {
        "head-undeclared",
        "shard-unindexed",
        "count-mismatch",
        "dtype-mixed",
        "quant-listed-unfused",
        "quant-config-conflict",
        "prefix-mismatch",
        "tensors-unexpected",
        "head-prefix",
        "quant-runtime-name",
        "engine-version",
        "experts-doubled",
    }
)
"""Warnings that become errors where an engine that would otherwise run the head fails because of them."""


def heads_unused(case: Case, verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    limited = [name for name, v in verdicts.items() if "heads-unused" in v.reasons]
    if limited:
        failing = any("heads-unused" in verdicts[name].fatal for name in limited)
        extra = tuple(t.weight.key for t in case.facts.head.values() if t.layer > 0)
        yield Finding(
            "heads-unused",
            "error" if failing else "info",
            f"The checkpoint holds {len(case.facts.layers)} head layers, more than "
            f"{together([ENGINE[n].title for n in limited])} {'runs' if len(limited) == 1 else 'run'}.",
            "Choose an engine that runs all of them, or expect the acceptance of the first.",
            extra,
        )


def head_prefix(case: Case, verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    blind = [name for name, v in verdicts.items() if "head-prefix" in v.reasons]
    facts, family = case.facts, case.facts.family
    if not blind or family is None:
        return
    keys = tuple(t.weight.key for t in facts.head.values())
    with_target = family.head[0].key.startswith("model.")
    bare = keys[0].removeprefix(facts.prefix)
    titles = together([ENGINE[n].title for n in blind])
    yield Finding(
        "head-prefix",
        "warning",
        f"The head's keys stand under {facts.prefix!r}, where {titles} {'does' if len(blind) == 1 else 'do'} not look: "
        f"{keys[0]}, published as {'model.' if with_target else ''}{bare}.",
        "Rename the target's keys and the head's together, as published."
        if with_target
        else "Write a folder with the head's keys as published",
        keys,
        "" if with_target else case.rewrite(),
    )


def engine_version(case: Case, verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    for name, verdict in verdicts.items():
        if "engine-version" in verdict.reasons:
            yield Finding(
                "engine-version",
                "warning",
                f"{ENGINE[name].title} {verdict.version} {verdict.error}, whatever the checkpoint.",
                f"Use another version, for example {ENGINE[name].newest}.",
            )


def quant_runtime_name(case: Case, verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    kinds = kinds_of(case)
    scheme = case.scheme
    engines = [e for e in ("sglang", "vllm") if "quant-runtime-name" in verdicts[e].reasons]
    told: dict[str, str] = {}
    modules: dict[str, HeadModule] = {}
    split = False
    for engine in engines:
        support = next(s for s in SUPPORT[engine] if any(k in kinds for k in s.kinds))
        found = [c for c in clashes(case, engine, support, verdicts[engine].version) if c.code == "quant-runtime-name"]
        told |= {c.runtime: c.modules[0].module for c in reversed(found)}
        modules |= {m.module: m for c in found for m in c.modules}
        split |= any(c.kind == "split" for c in found)
    if not engines or scheme is None:
        return
    names = list(reversed(told))
    titles = together([ENGINE[e].title for e in engines])
    own = {t.module for t in case.facts.head.values()}
    layers = {_layer(m) for m in case.claims.modules if m not in own} - {None}
    shadowed = any(_layer(n) in layers for n in names)
    others = [e for e in ("vllm", "sglang") if e not in engines and verdicts[e].verdict == "works"]
    if shadowed and others:
        advice, command = (
            f"Run it in {ENGINE[others[0]].title}, whose names the entries match",
            verdicts[others[0]].command,
        )
    elif shadowed:
        advice, command = "Put a head that is quantised like the target in its place", case.take_from("HEAD")
    else:
        advice = f"In {scheme.file}, exempt these names too: {json.dumps(names)}; or write a folder that does"
        command = case.rewrite()
    does = "cannot build from it" if split else f"build{'s' if len(engines) == 1 else ''} quantised all the same"
    too = ", which a layer of the target has too" if shadowed else ""
    yield Finding(
        "quant-runtime-name",
        "warning",
        f"The list exempts {plural(len(modules), 'head tensor')} that {titles} {does}: "
        f"the entries do not match {names[0]}, the name there for {told[names[0]]}{too}.",
        advice,
        tuple(m.tensor.weight.key for m in modules.values()),
        command,
    )


def _layer(module: str) -> str | None:
    """``model.layers.0`` for ``model.layers.0.mlp.experts``; None outside numbered layers."""
    match = re.match(r"(.*?\blayers\.\d+)\.", module)
    return match[1] if match else None


RULES = (heads_unused, head_prefix, engine_version, quant_runtime_name)


def raised(findings: Iterable[Finding], verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    """The findings, with those warnings made errors that make an engine fail."""
    fatal = {code for v in verdicts.values() for code in v.fatal}
    for finding in findings:
        if finding.severity == "warning" and finding.code in RAISED_WHERE_AN_ENGINE_FAILS & fatal:
            yield replace(finding, severity="error")
        else:
            yield finding
