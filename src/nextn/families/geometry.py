"""config.json -> symbolic dimensions and flags, the same names for all families.

The field spells one thing in several ways (``num_experts``, ``n_routed_experts``, ``num_local_experts``); this is the
one place that knows them. Values that are not whole numbers in a sane range are refused, since they come from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextn.errors import NextnError

LIMIT = 1 << 40
COUNT_LIMIT = 1 << 20
COUNTS = frozenset({"layers", "experts", "heads", "kv_heads"})
"""Dimensions that count things, of which no model has a million."""

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "vocab": ("vocab_size",),
    "layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_groups"),
    "head_dim": ("head_dim",),
    "v_head_dim": ("v_head_dim",),
    "inter": ("intermediate_size", "ffn_hidden_size"),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"),
    "moe_inter": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_inter": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
        "share_expert_dims",
    ),
    "dense_inter": ("dense_intermediate_size",),
    "latent": ("moe_latent_size", "routed_expert_hidden_size"),
    "swa_heads": ("swa_num_attention_heads", "num_sliding_attention_heads"),
    "swa_kv_heads": ("swa_num_key_value_heads",),
    "swa_head_dim": ("swa_head_dim",),
    "swa_v_head_dim": ("swa_v_head_dim",),
    "gdn_k_heads": ("linear_num_key_heads",),
    "gdn_v_heads": ("linear_num_value_heads",),
    "gdn_k_dim": ("linear_key_head_dim",),
    "gdn_v_dim": ("linear_value_head_dim",),
    "conv": ("linear_conv_kernel_dim",),
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "qk_nope": ("qk_nope_head_dim",),
    "qk_rope": ("qk_rope_head_dim",),
    "index_heads": ("index_n_heads", "indexer_n_heads"),
    "index_kv_heads": ("indexer_kv_heads",),
    "index_dim": ("index_head_dim", "indexer_head_dim"),
    "index_pool": ("index_kpool",),
    "o_groups": ("o_groups",),
    "o_lora": ("o_lora_rank",),
    "streams": ("hc_mult", "hc_count"),
    "stream_lora": ("hc_lowrank",),
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: ``text_config`` (or ``llm_config``) where nested, else the config."""
    for name in ("text_config", "llm_config", "language_config"):
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return nested
    return config


def whole(value: Any, name: str, limit: int = LIMIT) -> int:
    """A whole number from 0 to `limit` from a config. Raises NextnError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        shown = repr(value)[:60] if not isinstance(value, int) or abs(value) < 10**30 else "a number of over 30 digits"
        raise NextnError(
            f"config.json gives {name} as {shown}, which is not a sane whole number.",
            "Correct config.json.",
        )
    return value


class Sizes(dict[str, int]):
    """Dimensions by name. A value that the config spells in a form that cannot be is an error where it is needed.

    Attributes:
        bad: dimension -> what is wrong with its value in the config.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bad: dict[str, NextnError] = {}

    def __missing__(self, name: str) -> int:
        if name in self.bad:
            raise self.bad[name]
        raise KeyError(name)


def geometry(config: Mapping[str, Any]) -> Sizes:
    """Symbolic dimensions and flags of a config (top level or with a nested text config).

    Flags: ``moe``, ``dense``, ``qk_norm``, ``attention_bias``, ``q_gate`` (2 where q_proj carries the output gate),
    ``tied``. Absent dimensions are left out: a missing one is a KeyError where it is needed, one whose value cannot
    be is a NextnError there.
    """
    text = text_config(config)
    dims = Sizes()
    for name, spellings in ALIASES.items():
        for spelling in spellings:
            value = text.get(spelling)
            if value is None or isinstance(value, (list, dict)):
                continue
            try:
                dims[name] = whole(value, spelling, COUNT_LIMIT if name in COUNTS else LIMIT)
            except NextnError as error:
                dims.bad[name] = error
            break
    if "kv_heads" not in dims and "heads" in dims:
        dims["kv_heads"] = dims["heads"]
    if "head_dim" not in dims and dims.get("heads") and "hidden" in dims:
        dims["head_dim"] = dims["hidden"] // dims["heads"]
    if "v_head_dim" not in dims and "head_dim" in dims:
        dims["v_head_dim"] = dims["head_dim"]
    for name in ("heads", "kv_heads", "head_dim"):
        if f"swa_{name}" not in dims and name in dims:
            dims[f"swa_{name}"] = dims[name]
    if "swa_v_head_dim" not in dims and "swa_head_dim" in dims:
        dims["swa_v_head_dim"] = dims["v_head_dim"] if "v_head_dim" in text else dims["swa_head_dim"]
    dims["one"] = 1
    dims["q_gate"] = 1
    dims["moe"] = int(dims.get("experts", 0) > 0)
    dims["dense"] = 1 - dims["moe"]
    dims["attention_bias"] = int(bool(text.get("attention_bias", False)))
    dims["qk_norm"] = int(bool(text.get("use_qk_norm", text.get("qk_norm", False))))
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if text is not config and config.get("tie_word_embeddings") is not None:
        tied = config["tie_word_embeddings"]
    dims["tied"] = int(bool(tied))
    if dims.get("shared_experts") and "shared_inter" not in dims and "moe_inter" in dims:
        dims["shared_inter"] = dims["shared_experts"] * dims["moe_inter"]
    return dims
