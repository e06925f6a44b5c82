"""The static check: what the files say, held against the family's contract by the rules of `nextn inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nextn.checkpoint.source import Checkpoint
from nextn.inspect.examine import Report, examine
from nextn.inspect.findings import Finding
from nextn.surgery.result import engine_notes


@dataclass(frozen=True)
class ContractCheck:
    """A report read as a verdict.

    Attributes:
        passed: a whole head is there, and nothing about it is an error.
        problems: findings of severity error; remarks: the others.
        engines: a sentence for each serving engine that fails on the checkpoint or runs it badly.
    """

    report: Report
    passed: bool
    problems: tuple[Finding, ...]
    remarks: tuple[Finding, ...]
    engines: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        facts = self.report.facts
        return {
            "passed": self.passed,
            "complete": facts.complete,
            "found": facts.found,
            "expected": len(facts.expected),
            "missing": list(facts.missing),
            "problems": [{"code": f.code, "message": f.message, "fix": f.fix} for f in self.problems],
            "remarks": [{"code": f.code, "severity": f.severity, "message": f.message} for f in self.remarks],
        }


def check_contract(checkpoint: Checkpoint, *, values: bool = False) -> ContractCheck:
    """Check a checkpoint statically.

    Args:
        values: read the head's weights too, and look at their values.
    Raises:
        NextnError: its configuration cannot be understood.
    """
    report = examine(checkpoint, values=(lambda done, of: None) if values else None)
    problems = tuple(f for f in report.findings if f.severity == "error")
    remarks = tuple(f for f in report.findings if f.severity != "error")
    engines = tuple(engine_notes(report)) if report.facts.complete else ()
    return ContractCheck(report, report.facts.complete and not problems, problems, remarks, engines)
