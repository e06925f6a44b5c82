"""Build checkpoints on disk from geometries: right shapes and dtypes, no weights (files are sparse)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from nextn.checkpoint.tensors import DTYPE_BITS
from nextn.families.contract import Family
from nextn.families.registry import family_geometry, find_family

Entry = tuple[str, tuple[int, ...]]
"""dtype and shape of a tensor."""


def write_safetensors(path: Path, tensors: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file whose data is a hole: every byte reads as zero and takes no room on disk."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for key, (dtype, shape) in tensors.items():
        nbytes = (prod(shape) * DTYPE_BITS[dtype] + 7) // 8
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)))
        file.write(raw)
        file.truncate(8 + len(raw) + at)


@dataclass
class Folder:
    """A checkpoint to be written: change what you like, then call `write`.

    Attributes:
        config: config.json.
        shards: file name -> tensors.
        index: "auto" to list all shards, None for no index, or a weight_map.
        extra: further JSON files by name.
    """

    config: dict[str, Any]
    shards: dict[str, dict[str, Entry]]
    index: dict[str, str] | str | None = "auto"
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        (root / "config.json").write_text(json.dumps(self.config))
        for name, value in self.extra.items():
            (root / name).write_text(json.dumps(value))
        for name, tensors in self.shards.items():
            write_safetensors(root / name, tensors)
        index = self.index
        if index == "auto":
            index = {k: f for f, tensors in self.shards.items() for k in tensors} if len(self.shards) > 1 else None
        if index is not None:
            path = root / "model.safetensors.index.json"
            path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return root

    @property
    def head(self) -> dict[str, Entry]:
        """The shard that holds the head; change it in place."""
        return self.shards[HEAD_SHARD]

    def drop(self, match: Callable[[str], bool]) -> None:
        """Remove all tensors whose key matches."""
        for tensors in self.shards.values():
            for key in [k for k in tensors if match(k)]:
                del tensors[key]

    def put(self, entries: Mapping[str, Entry], shard: str | None = None) -> None:
        self.shards.setdefault(shard or HEAD_SHARD, {}).update(entries)


TRUNK_SHARD = "model-00001-of-00002.safetensors"
HEAD_SHARD = "model-00002-of-00002.safetensors"


def checkpoint(
    config: Mapping[str, Any],
    *,
    experts: str = "split",
    layers: int | None = None,
    copies: bool = False,
    dtype: str = "BF16",
    trunk: Iterable[str] = (),
    prefix: str = "",
) -> Folder:
    """A clean checkpoint of a config's family: a few trunk tensors in one shard, the whole head in another.

    Args:
        layers: head layers to write; the declared or default count if None.
        copies: write optional tensors too.
        trunk: further trunk keys, written as square matrices.
        prefix: what to put before the head's keys.
    """
    family = find_family(config)
    assert family is not None
    dims = family_geometry(family, config)
    count = layers if layers is not None else _declared(family, config)
    head = {
        key: (dtype, shape)
        for _, key, shape, spec in family.expected(dims, count, experts=experts, prefix=prefix)
        if copies or not spec.optional
    }
    hidden, vocab = dims["hidden"], dims["vocab"]
    stem = "model.language_model." if "text_config" in config else "model."
    body: dict[str, Entry] = {f"{stem}embed_tokens.weight": (dtype, (vocab, hidden))}
    for at in range(min(2, dims.get("layers", 2))):
        body[f"{stem}layers.{at}.input_layernorm.weight"] = (dtype, (hidden,))
    for key in trunk:
        body[key] = (dtype, (hidden, hidden))
    body[f"{stem}norm.weight"] = (dtype, (hidden,))
    if not dims["tied"]:
        body["lm_head.weight"] = (dtype, (vocab, hidden))
    return Folder(json.loads(json.dumps(config)), {TRUNK_SHARD: body, HEAD_SHARD: head})


def _declared(family: Family, config: Mapping[str, Any]) -> int:
    from nextn.families.registry import declared_layers

    declared, _ = declared_layers(family, config)
    return declared if declared is not None else family.default_layers or 0


def qwen3_5(
    hidden: int = 1024,
    inter: int = 3584,
    layers: int = 24,
    heads: int = 8,
    kv_heads: int = 2,
    gdn_v_heads: int = 16,
    *,
    tied: bool = True,
    mtp: int | None = 1,
) -> dict[str, Any]:
    """config.json of Qwen3.5 dense; the defaults are the 0.8B model's."""
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "vocab_size": 248_320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": gdn_v_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": tied,
        "mtp_num_hidden_layers": mtp,
        "mtp_use_dedicated_embeddings": False,
    }
    if mtp is None:
        del text["mtp_num_hidden_layers"]
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": tied,
        "text_config": text,
    }


def qwen3_5_moe(hidden: int = 2048, experts: int = 256, moe_inter: int = 512, layers: int = 40) -> dict[str, Any]:
    """config.json of Qwen3.5 MoE; the defaults are those of 35B-A3B."""
    config = qwen3_5(hidden, 0, layers, 16, 2, 32, tied=False)
    config["model_type"], config["architectures"] = "qwen3_5_moe", ["Qwen3_5MoeForConditionalGeneration"]
    text = config["text_config"]
    del text["intermediate_size"]
    text |= {
        "model_type": "qwen3_5_moe_text",
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": moe_inter,
        "shared_expert_intermediate_size": moe_inter,
    }
    return config


def qwen3_next(experts: int = 8) -> dict[str, Any]:
    """config.json of Qwen3-Next-80B-A3B, with fewer experts unless asked: it declares no layer count."""
    return {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151_936,
        "num_experts": experts,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
    }
