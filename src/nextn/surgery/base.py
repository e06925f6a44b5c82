"""What a merge must know about its base: which keys are an old head's, what dtype and storage its own layers have."""

from __future__ import annotations

import re
from collections import Counter

from nextn.checkpoint.source import Checkpoint
from nextn.errors import NextnError
from nextn.families.contract import Family
from nextn.inspect.facts import Facts
from nextn.inspect.quant.stored import CACHE_PARTS, FULL, split_key
from nextn.surgery.check import few
from nextn.surgery.names import LAYER, root_of
from nextn.surgery.pieces import Storage

HF_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
EXPERT_KEY = re.compile(r"\.experts\.(?:(\d+)\.|(gate_up_proj|down_proj))")


def require_usable(base: Checkpoint) -> None:
    """Raises NextnError where a base cannot be merged into: not local, not safetensors, damaged, incomplete."""
    if base.kind != "safetensors":
        raise NextnError(f"{base.source} is a GGUF file.", "Merge into the safetensors checkpoint and convert that.")
    if base.root is None or not base.root.is_dir():
        raise NextnError(f"{base.source} is not on this machine.", "Download it first, e.g. with `hf download`.")
    if not base.config:
        raise NextnError(f"{base.source} holds no config.json.", "Name the folder of a checkpoint.")
    for file, reason in base.unreadable.items():
        raise NextnError(f"{base.root / file} cannot be used: {reason}", "Download it again.")
    if not base.tensors:
        raise NextnError(f"{base.source} holds no safetensors weights.", "Convert the checkpoint to safetensors.")


def old_head(base: Facts) -> frozenset[str]:
    """Every key of the base under a head's names: weights, scales, leftovers, and whatever else."""
    layers = base.dims.get("layers", 0)
    keys = {i.key for t in base.head.values() for i in (t.weight, *t.scales)}
    keys |= {*base.orphans, *base.unexpected, *base.foreign}
    roots = {root_of(split_key(k)[0], layers) for k in keys}
    for key in base.checkpoint.tensors:
        module, part = split_key(key)
        if part in CACHE_PARTS and root_of(module, layers) in roots:
            keys.add(key)
    return frozenset(keys)


def require_trunk(base: Checkpoint, old: frozenset[str], family: Family, layers: int) -> None:
    """Raises NextnError where the index names target tensors that are not on disk. An old head's may be gone."""
    for key, file in (base.index or {}).items():
        gone = file in base.absent_files or key in base.misplaced
        if gone and key not in old and family.locate(split_key(key)[0] + ".weight", layers=layers) is None:
            raise NextnError(
                f"The base is incomplete: its index places {key} in {file}, which does not hold it.",
                "Complete the base first.",
            )


def own_dtypes(base: Checkpoint, old: frozenset[str], family: Family) -> tuple[str, dict[str, str]]:
    """(the dtype the base keeps unquantised weights in, and by the end of a layer key the dtype of that tensor).

    The ends (``self_attn.q_norm.weight``) are there where all the base's layers agree.
    """
    ignored = [re.compile(p) for p in family.ignored]
    ends: dict[str, str] = {}
    split: set[str] = set()
    by_bytes: Counter[str] = Counter()
    embedding = None
    for key, info in base.tensors.items():
        if key in old or info.dtype not in FULL or any(p.fullmatch(key) for p in ignored):
            continue
        if key.endswith("embed_tokens.weight"):
            embedding = info.dtype
        if len(info.shape) > 1:
            by_bytes[info.dtype] += info.nbytes
        match = LAYER.match(key)
        if match:
            end = key[match.end() :]
            if ends.setdefault(end, info.dtype) != info.dtype:
                split.add(end)
    text = base.config.get("text_config")
    declared = next(
        (
            HF_DTYPES.get(str(c[f]))
            for c in (text, base.config)
            for f in ("dtype", "torch_dtype")
            if isinstance(c, dict) and c.get(f)
        ),
        None,
    )
    main = embedding or (by_bytes.most_common(1)[0][0] if by_bytes else declared or "BF16")
    return main, {e: d for e, d in ends.items() if e not in split}


def own_storage(base: Checkpoint, old: frozenset[str]) -> Storage | None:
    """How the base's own layers store routed experts; None where they have none."""
    for key in base.tensors:
        match = EXPERT_KEY.search(key)
        if match and key not in old:
            return "split" if match[1] else "grouped"
    return None


def expert_storage(asked: str, engine: str | None, family: Family, own: Storage | None, head: bool | None) -> Storage:
    """The storage to write routed experts in.

    Args:
        asked: ``auto``, ``split`` or ``grouped``.
        engine: the engine that will load the result, if one is named.
        own: of the base's own layers.
        head: whether the head stores them stacked; None where it has none.
    Raises:
        NextnError: the family has no such storage.
    """
    has = {s.experts for s in family.head if s.experts}
    if asked != "auto":
        if head is not None and asked not in has:
            raise NextnError(f"{family.title} has no {asked} experts.", "Leave --experts away.")
        return "split" if asked == "split" else "grouped"
    # SGLang 0.5.23 qwen3_next.py raises KeyError on stacked experts; vLLM 0.26 reads split ones only.
    if engine == "vllm" or family.name == "qwen3_next":
        return "split"
    if own in has:
        return own or "split"
    return "grouped" if head else "split"


def explain_present(base: Facts, old: frozenset[str]) -> NextnError:
    """Why a base that has a head is not merged into without being told to."""
    found = sorted(old)
    if not base.head and not base.foreign:
        return NextnError(
            f"{base.checkpoint.source} holds tensors under the head's names that its family does not know:"
            f" {few(sorted(base.unexpected), 8)}.",
            "Give --replace to leave them out of the result.",
        )
    return NextnError(
        f"{base.checkpoint.source} holds {len(found)} tensors of a head already ({few(found, 3)}).",
        "Give --replace to put the new head in their place.",
    )
