"""What each engine will do with this head: the rules that read the tables of `table.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nextn.inspect.case import Case
from nextn.inspect.engines.build import Clash, clashes, kinds_of, scheme_key
from nextn.inspect.engines.commands import command
from nextn.inspect.engines.table import ENGINE, KNOWN_BAD, REFUSED, SUPPORT, TRANSFORMERS_REASON, Support
from nextn.inspect.engines.versions import parse_version
from nextn.inspect.findings import Finding
from nextn.inspect.quant.scheme import Scheme

Level = Literal["works", "degraded", "fails", "unsupported", "unknown"]
WORSE = ("works", "degraded", "fails")

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
    """

    verdict: Level
    reasons: tuple[str, ...] = ()
    command: str = ""
    version: str = ""
    basis: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()

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


@dataclass(frozen=True, slots=True)
class Effect:
    """What one circumstance does to a run."""

    level: Literal["works", "degraded", "fails"]
    code: str
    text: str = ""


@dataclass
class Question:
    """One engine and version asked about one case."""

    case: Case
    codes: frozenset[str]
    engine: str
    version: str
    support: Support = field(default_factory=lambda: Support(()))

    @property
    def quantised(self) -> bool:
        return self.case.scheme is not None


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
    question = Question(case, codes, engine, at, support)
    effects = list(_effects(question))
    worst = max((WORSE.index(e.level) for e in effects), default=0)
    reasons = tuple(dict.fromkeys(e.code for e in effects if e.code))
    failing = [e.text for e in effects if e.level == "fails" and e.text]
    notes = [e.text for e in effects if e.level != "fails" and e.text]
    unread = _unread_behaviour(case, codes, engine, support)
    if unread is not None and worst == 0:
        code, note = unread
        found = tuple(dict.fromkeys((*reasons, *code)))
        return Verdict("unknown", found, command(case, engine, support, at), at, about.basis, notes=(note,))
    if engine == "vllm" and support.hybrid:
        notes.append("Prefix caching with MTP on hybrid models has open reports of wrong output; switch it off.")
    if about.read and at not in about.read:
        notes.append(f"Read from the source of {', '.join(about.read)}; {at} may differ.")
    return Verdict(
        WORSE[worst],  # type: ignore[arg-type]
        reasons,
        command(case, engine, support, at),
        at,
        about.basis,
        failing[0] if failing else "",
        tuple(notes),
    )


def _unread_behaviour(
    case: Case, codes: frozenset[str], engine: str, support: Support
) -> tuple[tuple[str, ...], str] | None:
    """(reasons, sentence) where the answer hangs on something that was not found out about the engine."""
    title = ENGINE[engine].title
    if "experts-grouped" in codes and support.grouped is None:
        return ("experts-grouped",), f"Whether {title} reads stacked experts in this head was not found out."
    quantised = case.scheme is not None and case.facts.checkpoint.kind != "gguf"
    if quantised and case.scheme is not None and engine in ("transformers", "tensorrt_llm", "llamacpp"):
        return (), f"How {title} treats a head under {case.scheme.method} was not found out."
    return None


def _effects(q: Question) -> Iterator[Effect]:
    yield from _known_bad(q)
    if "not-an-mtp-head" in q.codes:
        yield Effect("fails", "not-an-mtp-head", "the tensors under the head's names are another drafter's")
        return
    yield from _files(q)
    yield from _missing(q)
    yield from _count(q)
    yield from _shapes(q)
    yield from _layout(q)
    yield from _quantisation(q)


def _known_bad(q: Question) -> Iterator[Effect]:
    at = parse_version(q.version)
    for bad in KNOWN_BAD:
        inside = parse_version(bad.since) <= at <= parse_version(bad.until)
        if bad.engine == q.engine and inside and (q.support.hybrid or not bad.hybrid):
            yield Effect(bad.verdict, "", bad.error)


def _files(q: Question) -> Iterator[Effect]:
    if "file-unreadable" in q.codes:
        yield Effect("fails", "file-unreadable", "a weight file cannot be read")
    absent = q.case.facts.checkpoint.absent_files
    if "shard-missing" in q.codes:
        names = list(absent[:2])
        texts = {
            "sglang": f"RuntimeError: the index references {len(absent)} shard file(s) missing: {names}",
            "vllm": f"FileNotFoundError: Weight files referenced in index but missing: {names}",
        }
        yield Effect("fails", "shard-missing", texts.get(q.engine, f"{absent[0]} is missing" if absent else ""))


def _missing(q: Question) -> Iterator[Effect]:
    facts = q.case.facts
    unread = _unread(q)
    code = "head-missing" if "head-missing" in q.codes else "head-partial" if "head-partial" in q.codes else ""
    if not code and unread:
        code = "shard-unindexed"
    if not code:
        return
    keys = facts.missing or tuple(unread)
    first = keys[0] if keys else ""
    if q.engine == "llamacpp":
        number = facts.dims.get("layers", 0)
        yield Effect(
            "fails", code, f"error loading model: missing tensor 'blk.{number}...'; the converted file is incomplete"
        )
    elif q.support.missing == "error":
        yield Effect("fails", code, f"weights of the MTP layer are missing from the checkpoint ({first})")
    elif q.support.missing == "unquantised" and not q.quantised:
        name = "model." + first.removeprefix("mtp.") if first.startswith("mtp.") else first
        yield Effect(
            "fails", code, f"ValueError: Following weights were not initialized from checkpoint: {{'{name}', ...}}"
        )
    else:
        yield Effect(
            "degraded", code, "loads without a word and leaves the missing tensors at random; drafts are rejected"
        )


def _unread(q: Question) -> list[str]:
    """Head tensors in files that the index does not name, where the engine goes by the index."""
    facts = q.case.facts
    files = set(facts.checkpoint.unindexed_files)
    if q.engine == "sglang" and "Glm4MoeForCausalLM" in kinds_of(q.case):
        files.discard("mtp.safetensors")
    return [t.weight.key for t in facts.head.values() if t.weight.file in files]


def _count(q: Question) -> Iterator[Effect]:
    facts = q.case.facts
    declared = facts.declared
    if "head-undeclared" in q.codes:
        zero = declared == 0
        if q.support.count == "positive" or (q.support.count == "nonzero" and zero):
            text = {
                "vllm": "ZeroDivisionError while num_speculative_tokens is checked against a declared count of 0",
                "llamacpp": "the converter leaves the head out, as the config declares none",
            }.get(q.engine, "the config declares no MTP layers")
            yield Effect("fails", "head-undeclared", text)
        else:
            yield Effect("works", "head-undeclared", "runs one layer whatever the config declares")
    if "count-mismatch" in q.codes and declared is not None and declared > len(facts.layers):
        if q.support.heads is None or declared <= q.support.heads:
            level: Literal["degraded", "fails"] = "fails" if q.support.missing != "silent" else "degraded"
            yield Effect(level, "count-mismatch", f"expects {declared} head layers, the files hold {len(facts.layers)}")
        else:
            yield Effect("works", "count-mismatch")
    if q.support.heads is not None and len(facts.layers) > q.support.heads:
        yield Effect("degraded", "heads-unused", f"runs {q.support.heads} of {len(facts.layers)} head layers")


def _shapes(q: Question) -> Iterator[Effect]:
    if "shape-mismatch" in q.codes:
        wrong = next((t for t in q.case.facts.head.values() if _wrong_shape(q.case, t.name)), None)
        shown = f"{wrong.key} has shape {list(wrong.weight.shape)}" if wrong else "a head tensor has the wrong shape"
        kind = "AssertionError" if q.engine in ("sglang", "vllm") else "error"
        yield Effect("fails", "shape-mismatch", f"{kind} while loading: {shown}")


def _wrong_shape(case: Case, name: str) -> bool:
    expected = case.facts.expected.get(name)
    return expected is not None and case.facts.head[name].weight.shape != expected[1]


def _layout(q: Question) -> Iterator[Effect]:
    grouped = q.support.grouped
    if q.engine == "vllm" and parse_version(q.version) < (0, 33):
        grouped = False
    if "experts-grouped" in q.codes and grouped is False:
        yield Effect("fails", "experts-grouped", "KeyError: '...mlp.experts.gate_up_proj'")
    if "tensors-unexpected" in q.codes and q.support.unknown == "error":
        first = q.case.facts.unexpected[0]
        yield Effect("fails", "tensors-unexpected", f"KeyError: {first!r}")


def _quantisation(q: Question) -> Iterator[Effect]:
    case, scheme = q.case, q.case.scheme
    if "scales-stale" in q.codes and q.engine == "vllm":
        yield Effect("fails", "scales-stale", "ValueError: There is no module or parameter for the scale")
    elif "scales-stale" in q.codes and q.support.unknown == "error":
        yield Effect("fails", "scales-stale", "KeyError: the scale has no parameter to go to")
    elif "scales-stale" in q.codes:
        yield Effect("works", "scales-stale", "the scale is skipped with a warning")
    if "scales-missing" in q.codes:
        yield Effect("degraded", "scales-missing", "scales stay at random; drafts are rejected")
    if q.engine not in ("sglang", "vllm"):
        return
    if not q.support.strict:
        for code in ("quant-unlisted", "quant-fused-split", "quant-undeclared", "quant-exempt-quantised"):
            if code in q.codes:
                yield Effect("degraded", code, "the head is probably built otherwise than it is stored")
        return
    seen: set[tuple[str, str]] = set()
    for clash in clashes(case, q.engine, q.support, q.version):
        if (clash.kind, clash.code) in seen:
            continue
        seen.add((clash.kind, clash.code))
        if clash.kind == "split":
            yield Effect("fails", clash.code, f"ValueError: different quantization schemes within {clash.runtime}")
        elif clash.kind == "foreign":
            packed = clash.modules[0].tensor.form != "fp8"
            text = f"{clash.runtime} is built in full precision, the file holds {clash.modules[0].tensor.form}"
            if not packed and q.engine == "sglang" and "decoder" in clash.runtime:
                text += "; SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE=1 keeps FP8 experts (deep_gemm runner)"
            yield Effect("fails" if packed else "degraded", clash.code, text)
        else:
            yield _filled_wrongly(q, clash, scheme)
    if "prefix-mismatch" in q.codes and not any(code == "prefix-mismatch" for _, code in seen):
        yield Effect("degraded", "prefix-mismatch", "layers that the list means to spare are built quantised")


def _filled_wrongly(q: Question, clash: Clash, scheme: Scheme | None) -> Effect:
    """A full-precision weight meets a module that was built quantised: by the name and dtype of its parameter."""
    key = scheme_key(scheme) if scheme is not None else ""
    if key in ("fp8", "fbgemm_fp8", "modelopt_fp8"):
        return Effect("degraded", clash.code, f"{clash.runtime} is cast to FP8 and its scale stays at random")
    if key.startswith(("modelopt", "quark", "mxfp4", "bitsandbytes")):
        return Effect("fails", clash.code, f"AssertionError: shape mismatch while loading {clash.runtime}.weight")
    if q.engine == "sglang" and q.support.unknown == "skip":
        return Effect("degraded", clash.code, f"{clash.runtime} is built quantised and never filled: accept length 1.0")
    name = clash.runtime.removeprefix("mtp.")
    if "experts" in name:
        return Effect("fails", clash.code, f"KeyError: '{name}.w2_weight'")
    if q.engine == "sglang":
        return Effect("fails", clash.code, f"KeyError: '{name}.weight'")
    return Effect("fails", clash.code, f"ValueError: There is no module or parameter named '{name}.weight'")


def _judge_nextn(case: Case, codes: frozenset[str], version: str) -> Verdict:
    """nextn itself: families whose target it knows, full-precision weights, complete heads."""
    facts = case.facts
    basis = ENGINE["nextn"].basis
    if not facts.family or not facts.family.target:
        note = "nextn decodes Qwen3.5, Qwen3-Next and plain dense targets; launch SGLang or vLLM for this one."
        return Verdict("unsupported", version=version, basis=basis, notes=(note,))
    if case.scheme is not None:
        note = f"nextn decodes full-precision weights; this checkpoint is {case.scheme.method}: use nextn launch."
        return Verdict("unsupported", version=version, basis=basis, notes=(note,))
    blocking = ("file-unreadable", "shard-missing", "head-missing", "head-partial", "shape-mismatch", "not-an-mtp-head",
                "quant-undeclared", "scales-stale")  # fmt: skip
    reasons = tuple(c for c in blocking if c in codes)
    line = command(case, "nextn", Support(()), version)
    if reasons:
        error = f"error: the head cannot be loaded ({', '.join(reasons)})"
        return Verdict("fails", reasons, line, version, basis, error)
    if len(facts.layers) > 1 and facts.family.physical_layers == "reuse":
        return Verdict("degraded", ("heads-unused",), line, version, basis, notes=("runs 1 head layer",))
    return Verdict("works", (), line, version, basis)
