"""Examine a checkpoint: facts, findings and verdicts put together into the report that commands print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nextn.checkpoint.source import Checkpoint
from nextn.inspect.case import Case
from nextn.inspect.engines.verdict import Verdict, judge
from nextn.inspect.engines.versions import ENGINES
from nextn.inspect.facts import Facts, architecture, gather
from nextn.inspect.findings import RANK, Finding
from nextn.inspect.quant.read import read_schemes
from nextn.inspect.rules import engine as engine_rules
from nextn.inspect.rules import files, head, quantised


@dataclass(frozen=True)
class Report:
    """What `nextn inspect` knows about a checkpoint."""

    case: Case
    findings: tuple[Finding, ...]
    engines: Mapping[str, Verdict]

    @property
    def facts(self) -> Facts:
        return self.case.facts

    def worst(self) -> str | None:
        """The gravest severity among the findings."""
        return min((f.severity for f in self.findings), key=RANK.__getitem__, default=None)

    def as_json(self) -> dict[str, Any]:
        """The report in the form that ``--json`` prints; every key is always present."""
        facts, scheme = self.facts, self.case.scheme
        is_gguf = facts.checkpoint.kind == "gguf"
        names = facts.checkpoint.config.get("architectures")
        architectures = [architecture(facts.checkpoint)] if is_gguf else names if isinstance(names, list) else []
        return {
            "source": facts.checkpoint.source,
            "family": facts.family.name if facts.family else None,
            "architectures": [a for a in architectures if isinstance(a, str)]
            if isinstance(architectures, list)
            else [],
            "declared_layers": facts.declared,
            "declared_by": facts.declared_by,
            "heads_found": len(facts.layers),
            "complete": facts.complete,
            "tensors": {
                "expected": len(facts.expected),
                "found": facts.found,
                "missing": list(facts.missing),
                "unexpected": [*facts.unexpected, *facts.foreign],
                "bytes": facts.nbytes,
            },
            "dtypes": facts.dtypes,
            "quantization": {
                "method": scheme.method if scheme else "gguf" if is_gguf else None,
                "head": self.case.claims.stored,
                "algorithm": scheme.algorithm if scheme else "",
                "declared_in": [s.file for s in self.case.schemes],
            },
            "findings": [
                {
                    "code": f.code,
                    "severity": f.severity,
                    "message": f.message,
                    "fix": f.fix,
                    "command": f.command,
                    "tensors": list(f.tensors),
                }
                for f in self.findings
            ],
            "remote": {"commit": remote.commit, "requests": remote.requests, "bytes_read": remote.bytes_read}
            if (remote := facts.checkpoint.remote)
            else None,
            "engines": {name: self.engines[name].as_json() for name in ENGINES},
        }


def examine(
    checkpoint: Checkpoint,
    versions: Mapping[str, str] | None = None,
    *,
    values: Callable[[int, int], None] | None = None,
) -> Report:
    """Inspect a listed checkpoint.

    Args:
        versions: engine -> version to judge, where not the newest known.
        values: given, the weights are read and checked; called with (tensors read, tensors in all).
    Raises:
        NextnError: the configuration cannot be understood.
    """
    case = Case(gather(checkpoint), read_schemes(checkpoint))
    found = [finding for rule in (*files.RULES, *head.RULES, *quantised.RULES) for finding in rule(case)]
    if values is not None:
        from nextn.inspect.rules import values as value_rules

        measured = value_rules.measure(case, values)
        found += [finding for check in value_rules.RULES for finding in check(case, measured)]
    versions = versions or {}
    verdicts = {name: judge(case, found, name, versions.get(name)) for name in ENGINES}
    found += [finding for rule in engine_rules.RULES for finding in rule(case, verdicts)]
    found = sorted(engine_rules.raised(found, verdicts), key=lambda f: RANK[f.severity])
    return Report(case, tuple(found), verdicts)
