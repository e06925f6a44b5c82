"""What a head costs in memory: its parts, a rank's share, and what loading it as a second model would add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nextn.inspect.facts import Facts, HeadTensor

PARTS = (
    ("norms", ("norm", "bias", "router", "shared_gate", "a_log", "dt_bias")),
    ("copies", (".embed.", ".head.")),
    ("fusion", ("fuse",)),
    ("attention", (".attn.", ".gdn.", ".mla.", ".ssm.", ".mamba.", ".kda.", ".indexer.")),
    ("experts", (".experts.",)),
    ("mlp", (".mlp.", ".shared", ".moe.")),
)
"""Part of the head -> words in canonical names; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, as stored.

    Attributes:
        parts: part of the head -> bytes.
        ranks: tensor-parallel ranks.
        per_rank_bytes: the head's share of the rank that holds most: matrices are split, norms and routers are
            repeated, K and V are repeated where there are more ranks than K/V heads, the fusion is repeated. Copies of
            shared tensors are not loaded.
        embedding_bytes, output_head_bytes: what a draft loaded as a second model would hold again, all ranks together.
    """

    parts: dict[str, int]
    ranks: int
    per_rank_bytes: int
    embedding_bytes: int
    output_head_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "parts": self.parts,
            "tensor_parallel": self.ranks,
            "per_rank_bytes": self.per_rank_bytes,
            "second_load": {
                "embedding_bytes": self.embedding_bytes,
                "output_head_bytes": self.output_head_bytes,
                "bytes": self.embedding_bytes + self.output_head_bytes,
                "per_rank_bytes": -(-(self.embedding_bytes + self.output_head_bytes) // self.ranks),
            },
        }


def part_of(tensor: HeadTensor) -> str:
    part = next((part for part, words in PARTS if any(word in tensor.name for word in words)), "other")
    if part != "copies" or tensor.spec.optional:
        return part
    return "embedding" if ".embed." in tensor.name else "output head"


def memory(facts: Facts, ranks: int = 1) -> Memory:
    """Memory facts of a head on `ranks` tensor-parallel ranks."""
    parts: dict[str, int] = {}
    share = 0
    kv_heads = max(1, facts.dims.get("kv_heads", 1))
    for tensor in facts.head.values():
        part = part_of(tensor)
        parts[part] = parts.get(part, 0) + tensor.nbytes
        if part == "copies":
            continue
        if part in ("norms", "fusion"):
            ways = 1
        elif tensor.name.endswith((".attn.k.weight", ".attn.v.weight")):
            ways = min(ranks, kv_heads)
        else:
            ways = ranks
        share += -(-tensor.nbytes // ways)
    embedding, output = _shared(facts)
    if "output head" in parts:
        output = 0
    if "embedding" in parts:
        embedding = 0
    return Memory(dict(sorted(parts.items())), ranks, share, embedding, output)


def _shared(facts: Facts) -> tuple[int, int]:
    """Bytes of the target's embedding and output head, as its headers give them (both 0 where it has none)."""
    tensors = facts.checkpoint.tensors
    found = {"embed": 0, "head": 0}
    for key, info in tensors.items():
        if key.endswith("embed_tokens.weight") and "mtp" not in key:
            found["embed"] = max(found["embed"], info.nbytes)
        elif key in ("lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight"):
            found["head"] = info.nbytes
    return found["embed"], found["head"]
