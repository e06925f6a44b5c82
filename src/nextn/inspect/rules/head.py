"""Is the head there, whole, of the right shape, and declared?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nextn.families.contract import ANY, fits
from nextn.inspect.case import Case
from nextn.inspect.facts import HeadTensor
from nextn.inspect.findings import Finding
from nextn.inspect.gguf import LOW_BITS, architecture
from nextn.inspect.quant.stored import FULL
from nextn.inspect.rules.words import listing, plural

SILENT_FAMILIES = frozenset({"qwen3_next", "longcat_flash", "mimo_v2", "mimo_v2_flash"})
"""Families whose published configs declare no layer count although the head is shipped."""

ONE_MORE = frozenset({"hy_v4"})
"""Families whose published configs declare one layer more than the head has (vLLM ``config/speculative.py``)."""

SMALL_DTYPES = ("norm", "bias", "router", "a_log", "dt_bias")
"""Words in the canonical names of tensors that publishers keep in another precision on purpose."""


def family_unknown(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.family is not None:
        return
    config = facts.checkpoint.config
    named = config.get("model_type") or config.get("architectures") or architecture(facts.checkpoint) or "nothing"
    where = "the file" if facts.checkpoint.kind == "gguf" else "config.json"
    if facts.lookalikes:
        yield Finding(
            "family-unknown",
            "warning",
            f"No known MTP family: {where} says {named!r}. Like a head's "
            f"{plural(len(facts.lookalikes), 'tensor looks', 'tensors look')}: {listing(facts.lookalikes)}.",
            "Check model_type in config.json; if the model is new, nextn needs a family file for it.",
            facts.lookalikes,
        )
    else:
        yield Finding(
            "family-unknown",
            "info",
            f"No known MTP family: {where} says {named!r}, and no tensor looks like a head's.",
            "Nothing to do: this model carries no MTP head that nextn knows.",
        )


def no_head(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.family and not facts.head and not facts.ships_head and not facts.foreign and not facts.missing_by_index:
        said = f"{facts.declared_by} is 0" if facts.declared_by else "nothing is declared, and the family ships none"
        yield Finding(
            "no-head",
            "info",
            f"There is no head and none is claimed: {said}.",
            f"To create one: nextn train {case.source} --start scratch.",
        )


def head_missing(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if not facts.family or facts.head or not facts.ships_head or facts.foreign or facts.missing_by_index:
        return
    if facts.declared_by:
        why = f"{facts.declared_by} says {facts.declared}"
    else:
        why = f"the {facts.family.title} family ships one, though its config declares no count"
    shown = facts.missing[0] if facts.missing else ""
    alias = next((f" (vLLM reports it as {_vllm_name(k)})" for k in facts.missing if _vllm_name(k) != k), "")
    yield Finding(
        "head-missing",
        "error",
        f"None of the {len(facts.expected)} head tensors is there, but {why}. The first one missing is {shown}{alias}.",
        f"Put the base model's head back: nextn extract BASE head && nextn merge {case.source} head OUT.",
        facts.missing,
    )


def _vllm_name(key: str) -> str:
    """The parameter name under which vLLM reports a missing ``mtp.`` tensor (``models/qwen3_5_mtp.py``)."""
    return "model." + key.removeprefix("mtp.") if key.startswith("mtp.") else key


def head_partial(case: Case) -> Iterator[Finding]:
    facts = case.facts
    absent = [k for k in facts.missing if k not in set(facts.missing_by_index)]
    if not facts.head or not absent:
        return
    yield Finding(
        "head-partial",
        "error",
        f"The head lacks {len(absent)} of {len(facts.expected)} tensors: {listing(absent)}.",
        f"Take the whole head from the base model: nextn extract BASE head && nextn merge {case.source} head OUT.",
        tuple(absent),
    )


def layout_unsure(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.unsure and facts.family is not None:
        yield Finding(
            "layout-unsure",
            "info",
            f"{plural(len(facts.unsure), 'tensor')} that a {facts.family.title} head may have is not there "
            f"({listing(facts.unsure)}), but its layout is not pinned by any source. {facts.family.note}".strip(),
            "Compare with the publisher's own checkpoint: nextn inspect PUBLISHED --tensors.",
            facts.unsure,
        )


def head_undeclared(case: Case) -> Iterator[Finding]:
    facts = case.facts
    family = facts.family
    if not family or not facts.head or facts.declared:
        return
    if facts.declared is None and family.name in SILENT_FAMILIES:
        return
    path = facts.declared_by or (family.layer_count[0] if family.layer_count else "num_nextn_predict_layers")
    state = "is 0" if facts.declared == 0 else "is absent"
    count = max(1, len(facts.layers))
    yield Finding(
        "head-undeclared",
        "warning",
        f"The head is there ({plural(facts.found, 'tensor')}), but {path} in config.json {state}.",
        f"Set {path} to {count} in config.json.",
        tuple(t.key for t in facts.head.values()),
    )


def count_mismatch(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if not facts.declared or not facts.head or facts.missing_by_index or facts.declared == len(facts.layers):
        return
    if not facts.layers or (facts.family and facts.family.name in ONE_MORE and facts.declared == len(facts.layers) + 1):
        return
    yield Finding(
        "count-mismatch",
        "warning",
        f"{facts.declared_by} declares {plural(facts.declared, 'head layer')}, "
        f"the files hold {len(facts.layers)} ({', '.join(map(str, facts.layers[:8]))}).",
        f"Set {facts.declared_by} to {len(facts.layers)} in config.json, or restore the layers that were lost.",
        tuple(t.key for t in facts.head.values() if t.layer >= facts.declared),
    )


def not_an_mtp_head(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.foreign:
        yield Finding(
            "not-an-mtp-head",
            "error",
            f"Under the head's prefix {plural(len(facts.foreign), 'tensor belongs', 'tensors belong')} "
            f"to another kind of drafter: {listing(facts.foreign)}.",
            "Use the drafter's own algorithm in the engine, not MTP; or merge an MTP head trained for this model.",
            facts.foreign,
        )


def tensors_unexpected(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.unexpected and not facts.foreign:
        pinned = facts.family is not None and facts.family.confidence == "full"
        yield Finding(
            "tensors-unexpected",
            "warning" if pinned else "info",
            f"Under the head's prefix {plural(len(facts.unexpected), 'tensor is', 'tensors are')} "
            f"not part of a {facts.family.title if facts.family else ''} head: {listing(facts.unexpected)}.",
            "Export the head again; engines ignore such tensors or stop at them.",
            facts.unexpected,
        )


def shape_mismatch(case: Case) -> Iterator[Finding]:
    facts = case.facts
    wrong: list[tuple[HeadTensor, tuple[int, ...], tuple[int, ...]]] = []
    for name, tensor in facts.head.items():
        stored = stored_shape(tensor)
        try:
            wanted = facts.expected[name][1] if name in facts.expected else tensor.spec.sizes(facts.dims)
        except KeyError:
            continue
        if stored is not None and not fits(stored, wanted):
            wrong.append((tensor, stored, wanted))
    if wrong:
        told = "; ".join(f"{t.key} is {list(s)}, the config asks for {_asked(w)}" for t, s, w in wrong[:3])
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        pinned = facts.family is not None and facts.family.confidence == "full"
        yield Finding(
            "shape-mismatch",
            "error" if pinned else "warning",
            f"{plural(len(wrong), 'head tensor has', 'head tensors have')} the wrong shape: {told}{more}.",
            f"Merge a head that was made for this model: nextn merge {case.source} HEAD OUT.",
            tuple(t.weight.key for t, _, _ in wrong),
        )


def _asked(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join("any" if n == ANY else str(n) for n in shape) + "]"


def stored_shape(tensor: HeadTensor) -> tuple[int, ...] | None:
    """The shape [out, in] that a stored weight stands for; None where the packing does not tell."""
    shape = tensor.weight.shape
    if tensor.form in ("full", "fp8", "int8"):
        return shape
    if tensor.form == "fp4" and tensor.weight.dtype == "U8" and len(shape) > 1 and shape[-1] > 1:
        return (*shape[:-1], shape[-1] * 2)
    return None


def dtype_mixed(case: Case) -> Iterator[Finding]:
    facts = case.facts
    held: dict[str, list[str]] = {}
    for tensor in facts.head.values():
        if tensor.weight.dtype in FULL and not any(word in tensor.name for word in SMALL_DTYPES):
            held.setdefault(tensor.weight.dtype, []).append(tensor.weight.key)
    if len(held) > 1:
        counts = Counter({d: len(k) for d, k in held.items()}).most_common()
        odd = [k for d, _ in counts[1:] for k in held[d]]
        yield Finding(
            "dtype-mixed",
            "warning",
            "The head's matrices are stored in several dtypes: " + ", ".join(f"{n} in {d}" for d, n in counts) + ".",
            f"Convert the head to one dtype: nextn merge {case.source} HEAD OUT converts to the base's.",
            tuple(odd),
        )


def fusion_overquantised(case: Case) -> Iterator[Finding]:
    """GGUF only: the fusion is small, and every draft goes through it."""
    low = [t for t in case.facts.head.values() if ".fuse." in t.name and LOW_BITS.match(t.weight.dtype)]
    if low and case.facts.checkpoint.kind == "gguf":
        yield Finding(
            "fusion-overquantised",
            "warning",
            f"{low[0].weight.key} is stored as {low[0].weight.dtype}; so few bits in the fusion cost acceptance.",
            "Quantise again with --tensor-type nextn.eh_proj=q8_0.",
            tuple(t.weight.key for t in low),
        )


def experts_grouped(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.stacked:
        grouped = tuple(t.key for t in facts.head.values() if t.spec.experts == "grouped")
        yield Finding(
            "experts-grouped",
            "info",
            f"The head's experts are stored stacked in {plural(len(grouped), 'tensor')}, not one tensor an expert.",
            "Nothing to do where the engine reads both; nextn merge rewrites either way.",
            grouped,
        )


def embedding_duplicated(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.family is None or facts.family.embedding == "own":
        return
    copies = [t for t in facts.head.values() if t.spec.optional and t.spec.shape == ("vocab", "hidden")]
    if copies:
        yield Finding(
            "embedding-duplicated",
            "info",
            f"The head carries its own copy of shared tensors ({sum(t.nbytes for t in copies) / 1e6:.0f} MB): "
            f"{listing([t.key for t in copies])}. Engines share the target's.",
            f"nextn extract {case.source} head leaves the copies out.",
            tuple(t.key for t in copies),
        )


def head_alone(case: Case) -> Iterator[Finding]:
    if case.facts.alone:
        yield Finding(
            "head-alone",
            "info",
            "The files hold the head and nothing else: it runs beside the model that it was taken from.",
            f"Name it as the draft of its base, or put it back: nextn merge BASE {case.source} OUT.",
        )


RULES = (
    family_unknown,
    not_an_mtp_head,
    head_missing,
    head_partial,
    layout_unsure,
    shape_mismatch,
    head_undeclared,
    count_mismatch,
    tensors_unexpected,
    dtype_mixed,
    fusion_overquantised,
    experts_grouped,
    embedding_duplicated,
    no_head,
    head_alone,
)
