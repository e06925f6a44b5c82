"""Findings that only an engine's way of building the head brings to light, and severities that depend on engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from nextn.inspect.case import Case
from nextn.inspect.engines.build import clashes, kinds_of
from nextn.inspect.engines.table import ENGINE, SUPPORT
from nextn.inspect.engines.verdict import Verdict
from nextn.inspect.findings import Finding
from nextn.inspect.rules.words import listing, plural

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
    }
)
"""Warnings that become errors where an engine that would otherwise run the head fails because of them."""


def heads_unused(case: Case, verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    limited = [name for name, v in verdicts.items() if "heads-unused" in v.reasons]
    if limited:
        extra = tuple(t.weight.key for t in case.facts.head.values() if t.layer > 0)
        yield Finding(
            "heads-unused",
            "info",
            f"The checkpoint holds {len(case.facts.layers)} head layers, more than "
            f"{listing([ENGINE[n].title for n in limited], 6)} {'runs' if len(limited) == 1 else 'run'}.",
            "Choose an engine that runs all of them, or expect the acceptance of the first.",
            extra,
        )


def quant_runtime_name(case: Case, verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    kinds = kinds_of(case)
    for engine in ("sglang", "vllm"):
        if "quant-runtime-name" not in verdicts[engine].reasons:
            continue
        support = next(s for s in SUPPORT[engine] if any(k in kinds for k in s.kinds))
        found = [c for c in clashes(case, engine, support, verdicts[engine].version) if c.code == "quant-runtime-name"]
        modules = [m for c in found for m in c.modules]
        title = ENGINE[engine].title
        yield Finding(
            "quant-runtime-name",
            "info",
            f"The list exempts {plural(len(modules), 'head tensor')} that {title} "
            f"{'cannot build from it' if found[0].kind == 'split' else 'builds quantised all the same'}: it "
            f"matches its own names, and {found[0].runtime} (for {modules[0].module}) is not matched by the entries.",
            f"For {title}, exempt its names too: {listing(sorted({c.runtime for c in found}))}.",
            tuple(m.tensor.weight.key for m in modules),
        )


RULES = (heads_unused, quant_runtime_name)


def raised(findings: Iterable[Finding], verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    """The findings, with those warnings made errors that make an engine fail."""
    fatal = {code for v in verdicts.values() if v.verdict == "fails" for code in v.reasons}
    for finding in findings:
        if finding.severity == "warning" and finding.code in RAISED_WHERE_AN_ENGINE_FAILS & fatal:
            yield replace(finding, severity="error")
        else:
            yield finding
