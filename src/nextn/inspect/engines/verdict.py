"""The verdict on each engine: what its effects come to, and nextn's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nextn.errors import NextnError
from nextn.families.geometry import text_config
from nextn.inspect.case import Case
from nextn.inspect.engines.build import kinds_of
from nextn.inspect.engines.commands import command
from nextn.inspect.engines.effects import Question, effects
from nextn.inspect.engines.support import Support
from nextn.inspect.engines.supported import SUPPORT
from nextn.inspect.engines.table import ENGINE, REFUSED, TRANSFORMERS_REASON
from nextn.inspect.engines.versions import parse_version
from nextn.inspect.findings import Finding
from nextn.models.config import refuse_features

Level = Literal["works", "degraded", "fails", "unsupported", "unknown"]
WORSE: tuple[Level, ...] = ("works", "unknown", "degraded", "fails")

NO_EXTERNAL_HEAD = {
    "transformers": (True, "transformers takes no head from a folder of its own."),
    "llamacpp": (True, "llama.cpp takes a head of its own as GGUF only (-md)."),
    "tensorrt_llm": (False, "Whether TensorRT-LLM takes a head from a folder of its own was not found out."),
}
"""Engine -> (whether it is known to refuse, why)."""


@dataclass(frozen=True)
class Verdict:
    """One engine's part of a report.

    Attributes:
        verdict: what happens.
        reasons: codes of the findings behind it.
        command: how to switch the head on; "" where it cannot be.
        version: the version judged.
        basis: what this rests on: reading source, documentation, or nextn's own code.
        error: what the user will see where it fails, "" elsewhere.
        notes: further sentences.
        fatal: those of the reasons for which it fails.
    """

    verdict: Level
    reasons: tuple[str, ...] = ()
    command: str = ""
    version: str = ""
    basis: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()
    fatal: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "command": self.command,
            "version": self.version,
            "basis": self.basis,
            "error": self.error,
            "notes": list(self.notes),
        }


def judge(case: Case, findings: Sequence[Finding], engine: str, version: str | None = None) -> Verdict:
    """The verdict of one engine, its newest known version unless one is given."""
    about = ENGINE[engine]
    at = version or about.newest
    if case.facts.checkpoint.kind == "gguf" and engine != "llamacpp":
        return Verdict(
            "unsupported", version=at, basis=about.basis, notes=(f"{about.title} does not run heads from GGUF.",)
        )
    if case.facts.family is None:
        level: Level = "unsupported" if engine == "nextn" else "unknown"
        return Verdict(level, ("family-unknown",), version=at, basis=about.basis)
    codes = frozenset(f.code for f in findings)
    if "no-head" in codes:
        return Verdict("unsupported", ("no-head",), version=at, basis=about.basis)
    if engine == "nextn":
        return _judge_nextn(case, codes, at)
    kinds = kinds_of(case)
    support = next((s for s in SUPPORT[engine] if any(k in kinds for k in s.kinds)), None)
    if support is None:
        refused = next((REFUSED.get(engine, {}).get(k) for k in kinds if k in REFUSED.get(engine, {})), None)
        if refused is None and engine == "transformers":
            refused = TRANSFORMERS_REASON
        sure = refused is not None or engine in ("sglang", "vllm")
        note = refused or f"{about.title} {about.newest} lists no MTP head for {', '.join(kinds[:2]) or 'this model'}"
        return Verdict("unsupported" if sure else "unknown", version=at, basis=about.basis, notes=(f"{note}.",))
    since = max(about.since, support.since, key=parse_version)
    if since and parse_version(at) < parse_version(since):
        return Verdict("unsupported", version=at, basis=about.basis, notes=(f"Supported since {since}.",))
    if case.facts.alone and engine in NO_EXTERNAL_HEAD:
        known, note = NO_EXTERNAL_HEAD[engine]
        return Verdict("unsupported" if known else "unknown", ("head-alone",), "", at, about.basis, notes=(note,))
    found = list(effects(Question(case, codes, engine, at, support)))
    worst = max((WORSE.index(e.level) for e in found), default=0)
    reasons = tuple(dict.fromkeys(e.code for e in found if e.code))
    failing = [e.text for e in found if e.level == "fails" and e.text]
    notes = [] if failing else list(dict.fromkeys(e.text for e in found if e.text))
    if engine == "vllm" and support.hybrid and not failing:
        notes.append("Prefix caching with MTP on hybrid models has open reports of wrong output; switch it off.")
    if about.read and at not in about.read:
        notes.append(f"Read from the source of {', '.join(about.read)}; {at} may differ.")
    return Verdict(
        WORSE[worst],
        reasons,
        command(case, engine, support, at),
        at,
        about.basis,
        failing[0] if failing else "",
        tuple(notes),
        tuple(dict.fromkeys(e.code for e in found if e.level == "fails")),
    )


def _judge_nextn(case: Case, codes: frozenset[str], version: str) -> Verdict:
    """nextn itself: families whose target it knows, full-precision weights, complete heads."""
    facts = case.facts
    basis = ENGINE["nextn"].basis
    if not facts.family or not facts.family.target:
        note = "nextn decodes Qwen3.5, Qwen3-Next and plain dense targets; run this one in SGLang or vLLM."
        return Verdict("unsupported", version=version, basis=basis, notes=(note,))
    if case.scheme is None and facts.checkpoint.config.get("quantization_config"):
        note = "config.json holds a quantization_config that cannot be read; nextn decodes full-precision weights."
        return Verdict("unsupported", version=version, basis=basis, notes=(note,))
    if case.scheme is not None:
        note = f"nextn decodes full-precision weights; this checkpoint is {case.scheme.method}: use SGLang or vLLM."
        return Verdict("unsupported", version=version, basis=basis, notes=(note,))
    try:
        refuse_features(text_config(facts.checkpoint.config))
    except NextnError as refusal:
        return Verdict("unsupported", version=version, basis=basis, notes=(refusal.what,))
    blocking = ("weights-missing", "file-unreadable", "shard-missing", "head-missing", "head-partial", "shape-mismatch",
                "not-an-mtp-head", "tensors-unexpected", "quant-undeclared", "scales-stale")  # fmt: skip
    reasons = tuple(c for c in blocking if c in codes)
    line = command(case, "nextn", Support(()), version)
    if reasons:
        error = f"error: the head cannot be loaded ({', '.join(reasons)})"
        return Verdict("fails", reasons, line, version, basis, error, fatal=reasons)
    if len(facts.layers) > 1 and facts.family.physical_layers == "reuse":
        return Verdict("degraded", ("heads-unused",), line, version, basis, notes=("runs 1 head layer",))
    return Verdict("works", (), line, version, basis)
