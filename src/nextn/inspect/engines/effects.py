"""What each circumstance of a checkpoint does to a run in one engine: the rules that read the tables of `table.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from nextn.families.contract import fits
from nextn.inspect.case import Case
from nextn.inspect.engines.build import Clash, clashes, kinds_of, modules_built, scheme_key
from nextn.inspect.engines.support import Support
from nextn.inspect.engines.table import ENGINE, KNOWN_BAD
from nextn.inspect.engines.versions import parse_version
from nextn.inspect.quant.claims import FUSED
from nextn.inspect.quant.scheme import Scheme
from nextn.inspect.quant.stored import split_key


@dataclass(frozen=True, slots=True)
class Effect:
    """What one circumstance does to a run; ``unknown`` where the engine's answer to it was not found out."""

    level: Literal["works", "unknown", "degraded", "fails"]
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

    def unread(self, code: str, about: str) -> Effect:
        return Effect("unknown", code, f"What {ENGINE[self.engine].title} does about {about} was not found out.")


def effects(q: Question) -> Iterator[Effect]:
    """Everything that bears on the verdict."""
    yield from _known_bad(q)
    if "not-an-mtp-head" in q.codes:
        yield Effect("fails", "not-an-mtp-head", "the tensors under the head's names are another drafter's")
        return
    yield from _files(q)
    under = _prefix(q)
    if under is not None:
        yield under
    if under is None or under.level == "unknown":
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
            yield Effect(bad.verdict, "engine-version" if bad.verdict != "works" else "", bad.text)


def _files(q: Question) -> Iterator[Effect]:
    if "weights-missing" in q.codes:
        yield Effect("fails", "weights-missing", "there are no weights to load")
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


def _prefix(q: Question) -> Effect | None:
    """Keys under a prefix that the engine does not look under: the whole head is passed over."""
    prefix, accepted = q.case.facts.prefix, q.support.prefixes
    if not prefix or not q.case.facts.head or (accepted is not None and prefix in accepted):
        return None
    if accepted is None:
        return q.unread("", f"a head under {prefix!r}")
    key = next(iter(q.case.facts.head.values())).weight.key
    if prefix in q.support.stops_at:
        return Effect("fails", "head-prefix", f"KeyError: {key!r}")
    bare = key.removeprefix(prefix)
    return _without(q, "head-prefix", bare if bare.startswith("mtp.") else f"model.{bare}", whole=True)


def _missing(q: Question) -> Iterator[Effect]:
    facts = q.case.facts
    code = next((c for c in ("head-missing", "head-partial") if c in q.codes), "")
    keys = facts.missing
    if not code:
        unread = _outside_index(q)
        if not unread:
            return
        code, keys = "shard-unindexed", tuple(unread)
        if ENGINE[q.engine].index is None:
            yield q.unread(code, "files that the index does not name")
            return
    yield _without(q, code, keys[0] if keys else "", whole=code == "head-missing" or len(keys) == len(facts.expected))


def _without(q: Question, code: str, first: str, *, whole: bool) -> Effect:
    """What becomes of a run without tensors of the head, the first of them `first`."""
    how = q.support.missing
    if how is None:
        return q.unread(code, "missing head tensors")
    if q.engine == "llamacpp":
        key = first if q.case.is_gguf else f"blk.{q.case.facts.dims.get('layers', 0)}..."
        return Effect("fails", code, f"error loading model: missing tensor '{key}'")
    if how == "error" or (how == "layer" and whole):
        return Effect("fails", code, f"weights of the MTP layer are missing from the checkpoint ({first})")
    if how in ("unquantised", "layer") and not q.quantised:
        name = "model." + first.removeprefix("mtp.") if first.startswith("mtp.") else first
        return Effect(
            "fails", code, f"ValueError: Following weights were not initialized from checkpoint: {{'{name}', ...}}"
        )
    what = "the head" if whole else "the missing tensors"
    return Effect("degraded", code, f"loads without a word and leaves {what} at random; drafts are rejected")


def _outside_index(q: Question) -> list[str]:
    """Head tensors in files that the index does not name, where the engine does not open those."""
    facts = q.case.facts
    if ENGINE[q.engine].index is False:
        return []
    files = set(facts.checkpoint.unindexed_files)
    if q.engine == "sglang" and "Glm4MoeForCausalLM" in kinds_of(q.case):
        files.discard("mtp.safetensors")
    return [t.weight.key for t in facts.head.values() if t.weight.file in files]


def _count(q: Question) -> Iterator[Effect]:
    facts, how = q.case.facts, q.support.count
    declared, found = facts.declared, len(facts.layers)
    mismatch = "count-mismatch" if "count-mismatch" in q.codes else "heads-unused"
    if "head-undeclared" in q.codes:
        yield from _undeclared(q)
    elif how == "one" and declared is not None and declared > 1:
        yield Effect("fails", mismatch, "AssertionError: Only 1 nextn layer is supported")
        return
    elif how is None and "count-mismatch" in q.codes:
        yield q.unread("count-mismatch", "a count that does not fit")
        return
    elif "count-mismatch" in q.codes and declared is not None and declared > found:
        if how == "ignored" and q.support.heads == 1:
            yield Effect("works", "count-mismatch", "runs one layer whatever the config declares")
        else:
            yield _without(q, "count-mismatch", facts.lost[0] if facts.lost else "", whole=True)
    elif q.support.unknown == "named" and found > max(declared or 1, 1) and facts.head:
        first = next(t.weight.key for t in facts.head.values() if t.layer >= max(declared or 1, 1))
        yield Effect("fails", mismatch, _refused(q, first))
        return
    if q.support.heads is not None and found > q.support.heads:
        yield Effect("degraded", "heads-unused", f"runs {q.support.heads} of {found} head layers")


def _undeclared(q: Question) -> Iterator[Effect]:
    how, zero = q.support.count, q.case.facts.declared == 0
    number = q.case.facts.dims.get("layers", 0)
    texts = {
        "vllm": "ZeroDivisionError while num_speculative_tokens is checked against a declared count of 0",
        "llamacpp": "the file declares no head"
        if q.case.is_gguf
        else f"ValueError: Can not map tensor 'model.layers.{number}.eh_proj.weight' (while converting)",
    }
    if how is None:
        yield q.unread("head-undeclared", "a count that is 0 or absent")
    elif how == "one":
        text = "AssertionError: Only 1 nextn layer is supported"
        yield Effect(
            "fails", "head-undeclared", text if zero else "ValueError: num_nextn_predict_layers is not in the config"
        )
    elif how == "positive" or (how == "nonzero" and zero):
        yield Effect("fails", "head-undeclared", texts.get(q.engine, "the config declares no MTP layers"))
    elif how == "ignored":
        yield Effect("works", "head-undeclared", "runs one layer whatever the config declares")
    else:
        yield Effect("works", "head-undeclared", "takes an absent count as 1")


def _shapes(q: Question) -> Iterator[Effect]:
    if "shape-mismatch" not in q.codes:
        return
    facts = q.case.facts
    wrong = next(
        (t for n, t in facts.head.items() if n in facts.expected and not fits(t.weight.shape, facts.expected[n][1])),
        None,
    )
    shown = f"{wrong.key} has shape {list(wrong.weight.shape)}" if wrong else "a head tensor has the wrong shape"
    if ENGINE[q.engine].basis != "source":
        yield q.unread("shape-mismatch", "a head tensor of the wrong shape")
        return
    kind = "AssertionError" if q.engine in ("sglang", "vllm") else "error"
    yield Effect("fails", "shape-mismatch", f"{kind} while loading: {shown}")


def _layout(q: Question) -> Iterator[Effect]:
    grouped = q.support.grouped
    if q.engine == "vllm" and parse_version(q.version) < (0, 33):
        grouped = False
    if "experts-grouped" in q.codes and grouped is None:
        yield q.unread("experts-grouped", "stacked experts in this head")
    elif "experts-grouped" in q.codes and not grouped:
        yield Effect("fails", "experts-grouped", "KeyError: '...mlp.experts.gate_up_proj'")
    if "experts-doubled" in q.codes:
        yield q.unread("experts-doubled", "experts that are stored twice")
    if "tensors-unexpected" in q.codes:
        yield from _unexpected(q)


def _unexpected(q: Question) -> Iterator[Effect]:
    refused = [k for k in q.case.facts.unexpected if not k.endswith((*q.support.spared, ".bias"))]
    if q.support.unknown is None:
        yield q.unread("tensors-unexpected", "unknown head tensors")
    elif q.support.unknown == "skip" or not refused:
        yield Effect("works", "tensors-unexpected", "skips the tensors that it does not know")
    else:
        yield Effect("fails", "tensors-unexpected", _refused(q, refused[0]))


def _refused(q: Question, key: str) -> str:
    """The error at a key that the engine has no place for."""
    if q.engine == "llamacpp":
        told = "error loading model: wrong number of tensors" if q.case.is_gguf else f"Can not map tensor '{key}'"
        return told if q.case.is_gguf else f"ValueError: {told} (while converting)"
    name = key
    before, after = q.support.rename
    if before and "{n}" not in before and name.startswith(before):
        name = after + name.removeprefix(before)
    if q.support.unknown != "named":
        return f"KeyError: {name!r}"
    return f"ValueError: There is no module or parameter named {_in_vllm(name)!r} in ..."


def _in_vllm(key: str) -> str:
    """A key as vLLM's loader of an ``mtp.`` head names it: the head's root dropped, projections fused."""
    module, _, part = key.removeprefix("mtp.").rpartition(".")
    parent, _, name = module.rpartition(".")
    fused = name if ".experts." in module else FUSED.get(name, name)
    return ".".join(p for p in (parent, fused, part) if p)


def _quantisation(q: Question) -> Iterator[Effect]:
    case, scheme = q.case, q.case.scheme
    if q.engine not in ("sglang", "vllm"):
        if case.is_gguf:
            return
        if scheme is not None:
            code = next((c for c in ("scales-stale", "quant-unlisted") if c in q.codes), "")
            yield q.unread(code, f"a head under {scheme.method}")
        for code in ("quant-undeclared", "scales-stale", "scales-missing"):
            if code in q.codes and scheme is None:
                yield q.unread(code, "a head that is stored quantised and not declared so")
        return
    if "scales-missing" in q.codes:
        yield Effect("degraded", "scales-missing", "scales stay at random; drafts are rejected")
    if not q.support.strict and scheme is not None:
        for code in ("quant-unlisted", "quant-fused-split", "quant-exempt-quantised", "scales-stale"):
            if code in q.codes:
                yield q.unread(code, "these lists (how it names the head's modules)")
        return
    yield from _stale_scales(q)
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
    own = {m.module for m in case.claims.head}
    if any(module not in own for _, module in case.claims.missed):
        yield _target_clash(scheme)


def _stale_scales(q: Question) -> Iterator[Effect]:
    """Scales beside full-precision weights: loaded where the module is built quantised, else keys without a place."""
    if "scales-stale" not in q.codes:
        return
    quantised = {m.tensor.name for m, full in modules_built(q.case, q.engine, q.support, q.version) if not full}
    facts = q.case.facts
    stale = [(t, s) for t in facts.head.values() if t.form == "full" for s in t.scales]
    applied = [s.key for t, s in stale if t.name in quantised]
    homeless = [s.key for t, s in stale if t.name not in quantised] + list(facts.orphans)
    refused = [k for k in homeless if not k.endswith(q.support.spared)] if q.support.spared else homeless
    if applied:
        module = split_key(applied[0])[0]
        yield Effect("degraded", "scales-stale", f"{module} is built quantised, and the stale scale is applied to it")
    if refused and q.support.unknown is None:
        yield q.unread("scales-stale", "scales that no module has")
    elif refused and q.support.unknown != "skip":
        yield Effect("fails", "scales-stale", _refused(q, refused[0]))
    elif homeless:
        yield Effect("works", "scales-stale", "skips the scales")


def _target_clash(scheme: Scheme | None) -> Effect:
    """Full-precision layers of the target that a missed entry leaves to be built quantised."""
    if scheme is not None and scheme_key(scheme) in FP8:
        return Effect("degraded", "prefix-mismatch", "layers that the list means to spare are cast to FP8")
    text = "the target does not load: layers that the list means to spare are built quantised"
    return Effect("fails", "prefix-mismatch", text)


FP8 = ("fp8", "fbgemm_fp8", "modelopt_fp8")
"""Schemes whose weights keep shape and name, so that a full-precision one is cast into them."""


def _filled_wrongly(q: Question, clash: Clash, scheme: Scheme | None) -> Effect:
    """A full-precision weight meets a module that was built quantised: by the name and dtype of its parameter."""
    key = scheme_key(scheme) if scheme is not None else ""
    if key in FP8:
        scaled = any(m.tensor.scales for m in clash.modules)
        rest = "with a scale that is not its own" if scaled else "and its scale stays at random"
        return Effect("degraded", clash.code, f"{clash.runtime} is cast to FP8 {rest}")
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
