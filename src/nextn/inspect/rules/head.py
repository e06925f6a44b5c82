"""Is the head there, whole, of the right shape, and declared?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from nextn.checkpoint.draft_ids import DRAFT_IDS, draft_ids
from nextn.errors import NextnError
from nextn.families.contract import ANY, fits
from nextn.inspect.case import Case
from nextn.inspect.facts import HeadTensor, architecture
from nextn.inspect.findings import Finding
from nextn.inspect.quant.stored import FULL
from nextn.inspect.rules.words import listing, plural

LOW_BITS = re.compile(r"I?Q[1-4]|TQ|MXFP4|NVFP4")
"""ggml types of at most about four bits a weight."""

SMALL_DTYPES = ("norm", "bias", "router", "shared_gate", "a_log", "dt_bias")
"""Words in the canonical names of tensors that publishers keep in another precision on purpose."""


NO_CONFIG = "there is no config.json"


def family_unknown(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.family is not None:
        return
    config = facts.checkpoint.config
    named = config.get("model_type") or config.get("architectures") or architecture(facts.checkpoint)
    where = "the file" if case.is_gguf else "config.json"
    said = f"{where} says {named!r}" if named else f"{where} names no model" if case.is_gguf or config else NO_CONFIG
    first_piece = case.is_gguf and not named and facts.checkpoint.absent_files
    advice = "Check model_type in config.json; if the model is new, nextn needs a family file for it."
    if first_piece:
        said = f"the metadata is in the first piece of the GGUF, and {min(facts.checkpoint.absent_files)} is not there"
        advice = f"Put {min(facts.checkpoint.absent_files)} beside it."
    if facts.lookalikes:
        yield Finding(
            "family-unknown",
            "warning",
            f"No known MTP family: {said}. Like a head's "
            f"{plural(len(facts.lookalikes), 'tensor looks', 'tensors look')}: {listing(facts.lookalikes)}.",
            advice,
            facts.lookalikes,
        )
    else:
        nothing = "Nothing to do: this model carries no MTP head that nextn knows."
        yield Finding(
            "family-unknown",
            "info",
            f"No known MTP family: {said}, and no tensor looks like a head's.",
            nothing if named else advice,
        )


def no_head(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if not facts.family or facts.head or facts.ships_head or facts.foreign or facts.missing_by_index:
        return
    if facts.in_the_dark:
        return
    said = f"{facts.declared_by} is 0" if facts.declared_by else "nothing is declared, and the family ships none"
    message = f"There is no head and none is claimed: {said}."
    if facts.family.target and not case.is_gguf:
        yield Finding("no-head", "info", message, "To create one", (), train(case, "scratch"))
    else:
        yield Finding("no-head", "info", message, "Nothing to do: nextn does not train heads for this family.")


def train(case: Case, start: str) -> str:
    """The command that trains a head for this checkpoint."""
    return f"nextn train model={case.named} init={start} data=DATA.jsonl output=HEAD"


def head_missing(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if not facts.family or facts.head or not facts.ships_head or facts.foreign:
        return
    if facts.missing_by_index or facts.in_the_dark:
        return
    if facts.declared_by:
        why = f"{facts.declared_by} says {facts.declared}"
    else:
        why = f"the {facts.family.title} family ships one, though its config declares no count"
    shown = facts.missing[0] if facts.missing else ""
    alias = next((f" (vLLM reports it as {_vllm_name(k)})" for k in facts.missing if _vllm_name(k) != k), "")
    message = (
        f"None of the {len(facts.expected)} head tensors is there, but {why}. The first one missing is {shown}{alias}."
    )
    advice = "Convert a checkpoint that holds its head" if case.is_gguf else "Put the base model's head back"
    command = CONVERT if case.is_gguf else case.take_from("BASE")
    yield Finding("head-missing", "error", message, advice, facts.missing, command)


CONVERT = "python convert_hf_to_gguf.py FOLDER --outfile OUT.gguf"


def _vllm_name(key: str) -> str:
    """The parameter name under which vLLM reports a missing ``mtp.`` tensor (``models/qwen3_5_mtp.py``)."""
    return "model." + key.removeprefix("mtp.") if key.startswith("mtp.") else key


def head_partial(case: Case) -> Iterator[Finding]:
    facts = case.facts
    by_index = set(facts.missing_by_index)
    absent = [k for k in facts.missing if k not in by_index]
    if not facts.head or not absent or facts.in_the_dark:
        return
    yield Finding(
        "head-partial",
        "error",
        f"The head lacks {len(absent)} of {len(facts.expected)} tensors: {listing(absent)}.",
        "Convert a checkpoint that holds the whole head" if case.is_gguf else "Take the whole head from the base model",
        tuple(absent),
        CONVERT if case.is_gguf else case.take_from("BASE"),
    )


def layout_unsure(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.unsure and facts.family is not None:
        yield Finding(
            "layout-unsure",
            "info",
            f"{plural(len(facts.unsure), 'tensor')} that a {facts.family.title} head may have is not there "
            f"({listing(facts.unsure)}), but its layout is not pinned by any source. {facts.family.note}".strip(),
            "Compare with the publisher's own checkpoint",
            facts.unsure,
            "nextn inspect PUBLISHED --tensors",
        )


def head_undeclared(case: Case) -> Iterator[Finding]:
    facts = case.facts
    family = facts.family
    if not family or not facts.head or facts.declared:
        return
    if facts.declared is None and not family.declares_count:
        return
    path = facts.declared_by or (family.layer_count[0] if family.layer_count else "num_nextn_predict_layers")
    state = "is 0" if facts.declared == 0 else "is absent"
    count = max(1, len(facts.layers))
    where = "the metadata" if case.is_gguf else "config.json"
    advice = f"Set {path} to {count} in config.json, or write a folder that declares it"
    command = case.rewrite()
    if case.is_gguf and facts.declared == 0 and not case.is_remote:
        advice, command = f"Set {path} to {count}", f"gguf-set-metadata {case.source} {path} {count}"
    elif case.is_gguf:
        advice, command = f"Convert again from a folder whose config.json declares {count}", CONVERT
    yield Finding(
        "head-undeclared",
        "warning",
        f"The head is there ({plural(facts.found, 'tensor')}), but {path} in {where} {state}.",
        advice,
        tuple(t.weight.key for t in facts.head.values()),
        command,
    )


def count_mismatch(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if not facts.declared or not facts.head or facts.missing_by_index or facts.in_the_dark or facts.family is None:
        return
    found = len(facts.layers)
    if not facts.layers or facts.declared in (found, found + facts.family.spare_layers):
        return
    extra = tuple(t.weight.key for t in facts.head.values() if t.layer >= facts.declared)
    own = facts.family.physical_layers != "reuse"
    if case.is_gguf:
        advice, command = f"Convert again from a folder whose config.json declares {found}", CONVERT
    elif found < facts.declared and own:
        advice, command = "Restore the layers that were lost, from the base model", case.take_from("BASE")
    else:
        advice = f"Set {facts.declared_by} to {found} in config.json, or write a folder that declares it"
        command = case.rewrite()
    yield Finding(
        "count-mismatch",
        "warning",
        f"{facts.declared_by} declares {plural(facts.declared, 'head layer')}, "
        f"the files hold {found} ({', '.join(map(str, facts.layers[:8]))}).",
        advice,
        facts.lost or extra,
        command,
    )


def not_an_mtp_head(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.foreign:
        yield Finding(
            "not-an-mtp-head",
            "error",
            f"Under the head's prefix {plural(len(facts.foreign), 'tensor belongs', 'tensors belong')} "
            f"to another kind of drafter: {listing(facts.foreign)}.",
            "Use the drafter's own algorithm in the engine, not MTP, or put an MTP head in its place",
            facts.foreign,
            case.take_from("HEAD"),
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
            "Put a head without them in its place; engines ignore such tensors or stop at them",
            facts.unexpected,
            CONVERT if case.is_gguf else case.take_from("BASE"),
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
            "Convert a checkpoint whose head fits" if case.is_gguf else "Merge a head that was made for this model",
            tuple(t.weight.key for t, _, _ in wrong),
            CONVERT if case.is_gguf else case.take_from("HEAD"),
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
            "Convert the head to one dtype" if case.is_gguf else "Convert the head to the base's dtype",
            tuple(odd),
            f"{CONVERT} --outtype bf16" if case.is_gguf else case.rewrite(),
        )


def fusion_overquantised(case: Case) -> Iterator[Finding]:
    """GGUF only: the fusion is small, and every draft goes through it."""
    low = [t for t in case.facts.head.values() if ".fuse." in t.name and LOW_BITS.match(t.weight.dtype)]
    if low and case.is_gguf:
        yield Finding(
            "fusion-overquantised",
            "warning",
            f"{low[0].weight.key} is stored as {low[0].weight.dtype}; so few bits in the fusion cost acceptance.",
            "Quantise again, with more bits for the fusion",
            tuple(t.weight.key for t in low),
            "llama-quantize --tensor-type nextn.eh_proj=q8_0 BF16.gguf OUT.gguf Q4_K_M",
        )


def experts_grouped(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.stacked:
        grouped = tuple(t.weight.key for t in facts.head.values() if t.spec.experts == "grouped")
        split = facts.complete and not case.is_gguf and not any(t.spec.experts == "split" for t in facts.head.values())
        yield Finding(
            "experts-grouped",
            "info",
            f"The head's experts are stored stacked in {plural(len(grouped), 'tensor')}, not one tensor an expert.",
            "To store them one by one" if split else "Nothing to do where the engine reads them.",
            grouped,
            f"{case.rewrite()} --experts split" if split else "",
        )


def embedding_duplicated(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.family is None or facts.family.embedding == "own" or case.is_gguf:
        return
    copies = [t for t in facts.head.values() if t.spec.optional and t.spec.shape == ("vocab", "hidden")]
    if copies:
        yield Finding(
            "embedding-duplicated",
            "info",
            f"The head carries its own copy of shared tensors ({sum(t.nbytes for t in copies) / 1e6:.0f} MB): "
            f"{listing([t.key for t in copies])}. Engines share the target's.",
            "Nothing to do, or take the head out without them" if facts.complete else "Nothing to do.",
            tuple(t.weight.key for t in copies),
            f"nextn extract {case.named} HEAD" if facts.complete else "",
        )


def experts_doubled(case: Case) -> Iterator[Finding]:
    facts = case.facts
    split = tuple(t.weight.key for t in facts.head.values() if t.spec.experts == "split") if facts.stacked else ()
    if split and not case.is_gguf:
        yield Finding(
            "experts-doubled",
            "warning",
            f"The head's experts are stored twice: stacked, and one tensor an expert ({listing(split)}).",
            "Put a head with one of the two in its place",
            split,
            case.take_from("BASE"),
        )


def head_alone(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.alone:
        yield Finding(
            "head-alone",
            "info",
            "The files hold the head and nothing else: it runs beside the model that it was taken from.",
            "Name it as the draft of its base, or put it back",
            (),
            case.on_disk("nextn merge BASE {here} OUT"),
        )
    elif facts.checkpoint.beside:
        yield Finding(
            "one-file",
            "info",
            f"This is one of {len(facts.checkpoint.beside) + 1} weight files; the others were not read.",
            "Inspect them together",
            (),
            f"nextn inspect {case.source}",
        )


def draft_vocab(case: Case) -> Iterator[Finding]:
    """The ids that the head was trained to draft, where they are not all."""
    facts = case.facts
    if case.is_gguf or not facts.head:
        return
    try:
        ids = draft_ids(facts.checkpoint)
    except NextnError as error:
        yield Finding("draft-vocab", "warning", error.what, f"Remove {DRAFT_IDS}, or take it from the head's source.")
        return
    vocab = facts.dims.get("vocab", 0)
    if ids is not None and ids[-1] >= vocab:
        message = f"{DRAFT_IDS} names id {ids[-1]}, and the vocabulary has {vocab}: it belongs to another model."
        yield Finding("draft-vocab", "warning", message, f"Remove {DRAFT_IDS}.")
    elif ids is not None:
        yield Finding(
            "draft-vocab",
            "info",
            f"The head was trained to draft {len(ids):,} of {vocab:,} ids ({DRAFT_IDS}). nextn drafts these alone; an "
            "engine that drafts from all ids may be accepted less.",
            "Nothing to do; `--draft-vocab full` drafts from all ids.",
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
    experts_doubled,
    embedding_duplicated,
    no_head,
    head_alone,
    draft_vocab,
)
