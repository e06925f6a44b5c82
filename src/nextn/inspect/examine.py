"""Examine a checkpoint: facts, findings and verdicts put together into the report that commands print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nextn.checkpoint.source import Checkpoint
from nextn.inspect.case import Case
from nextn.inspect.facts import Facts, gather
from nextn.inspect.findings import RANK, Finding
from nextn.inspect.quant.read import read_schemes
from nextn.inspect.rules import files, head, quantised

ENGINES = ("sglang", "vllm", "transformers", "llamacpp", "tensorrt_llm", "nextn")


@dataclass(frozen=True)
class Report:
    """What `nextn inspect` knows about a checkpoint."""

    case: Case
    findings: tuple[Finding, ...]

    @property
    def facts(self) -> Facts:
        return self.case.facts

    def as_json(self) -> dict[str, Any]:
        """The report in the form that ``--json`` prints; every key is always present."""
        facts = self.facts
        return {
            "source": facts.checkpoint.source,
            "family": facts.family.name if facts.family else None,
            "architectures": [str(a) for a in facts.checkpoint.config.get("architectures") or []],
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
                "method": self.case.scheme.method if self.case.scheme else None,
                "head": self.case.claims.stored,
            },
            "findings": [
                {
                    "code": f.code,
                    "severity": f.severity,
                    "message": f.message,
                    "fix": f.fix,
                    "tensors": list(f.tensors),
                }
                for f in self.findings
            ],
            "engines": {e: {"verdict": "unknown", "reasons": [], "command": ""} for e in ENGINES},
        }


def examine(checkpoint: Checkpoint) -> Report:
    """Inspect a listed checkpoint.

    Raises:
        NextnError: the configuration cannot be understood.
    """
    case = Case(gather(checkpoint), read_schemes(checkpoint))
    found = [finding for rule in (*files.RULES, *head.RULES, *quantised.RULES) for finding in rule(case)]
    found.sort(key=lambda f: RANK[f.severity])
    return Report(case, tuple(found))
