"""config.json -> symbolic dimensions and flags, the same names for all families.

The field spells one thing in several ways (``num_experts``, ``n_routed_experts``, ``num_local_experts``); this is the
one place that knows them. Values that are not whole numbers in a sane range are refused, since they come from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextn.errors import NextnError

LIMIT = 1 << 40

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "vocab": ("vocab_size",),
    "layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "v_head_dim": ("v_head_dim",),
    "inter": ("intermediate_size", "ffn_hidden_size"),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"),
    "moe_inter": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_inter": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "gdn_k_heads": ("linear_num_key_heads",),
    "gdn_v_heads": ("linear_num_value_heads",),
    "gdn_k_dim": ("linear_key_head_dim",),
    "gdn_v_dim": ("linear_value_head_dim",),
    "conv": ("linear_conv_kernel_dim",),
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "qk_nope": ("qk_nope_head_dim",),
    "qk_rope": ("qk_rope_head_dim",),
    "index_heads": ("index_n_heads",),
    "index_dim": ("index_head_dim",),
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: ``text_config`` (or ``llm_config``) where nested, else the config."""
    for name in ("text_config", "llm_config", "language_config"):
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return nested
    return config


def whole(value: Any, name: str) -> int:
    """A non-negative whole number from a config. Raises NextnError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LIMIT:
        raise NextnError(
            f"config.json gives {name} as {str(value)[:60]!r}, which is not a sane whole number.",
            "Correct config.json.",
        )
    return value


def geometry(config: Mapping[str, Any]) -> dict[str, int]:
    """Symbolic dimensions and flags of a config (top level or with a nested text config).

    Flags: ``moe``, ``dense``, ``qk_norm``, ``attention_bias``, ``q_gate`` (2 where q_proj carries the output gate),
    ``tied``. Absent dimensions are left out, so that a missing one is an error where it is needed.

    Raises:
        NextnError: a value is not a sane whole number.
    """
    text = text_config(config)
    dims: dict[str, int] = {}
    for name, spellings in ALIASES.items():
        for spelling in spellings:
            value = text.get(spelling)
            if value is not None and not isinstance(value, (list, dict)):
                dims[name] = whole(value, spelling)
                break
    if "kv_heads" not in dims and "heads" in dims:
        dims["kv_heads"] = dims["heads"]
    if "head_dim" not in dims and dims.get("heads") and "hidden" in dims:
        dims["head_dim"] = dims["hidden"] // dims["heads"]
    if "v_head_dim" not in dims and "head_dim" in dims:
        dims["v_head_dim"] = dims["head_dim"]
    dims["one"] = 1
    dims["q_gate"] = 1
    dims["moe"] = int(dims.get("experts", 0) > 0)
    dims["dense"] = 1 - dims["moe"]
    dims["attention_bias"] = int(bool(text.get("attention_bias", False)))
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if text is not config and config.get("tie_word_embeddings") is not None:
        tied = config["tie_word_embeddings"]
    dims["tied"] = int(bool(tied))
    if dims.get("shared_experts") and "shared_inter" not in dims and "moe_inter" in dims:
        dims["shared_inter"] = dims["shared_experts"] * dims["moe_inter"]
    return dims
