"""Nemotron-H and Nemotron 3: one head made of a pattern of layers, usually attention then experts.

``mtp.layers.{j}`` runs over the pattern: the fusion sits on its first layer, the end norm on its last. One draft step
is the whole pattern. Experts have no gate projection, and may work on a narrower latent state. Layout: vLLM
``models/nemotron_h_mtp.py``, transformers ``models/nemotron_h``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nextn.families import blocks
from nextn.families.contract import Family, TensorSpec

MAX_PATTERN = 6
KINDS = {
    "*": "attention",
    "E": "moe",
    "-": "mlp",
    "M": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "moe": "moe",
    "mlp": "mlp",
    "mamba": "mamba",
    "linear_attention": "mamba",
}


def head() -> tuple[TensorSpec, ...]:
    """The layers of every pattern position; flags ``p{j}_kind`` and ``p{j}_last`` of the geometry choose."""
    first = "mtp.layers.0"
    specs = [
        blocks.norm("mtp.0.embed_norm", f"{first}.enorm"),
        blocks.norm("mtp.0.hidden_norm", f"{first}.hnorm"),
        blocks.linear("mtp.0.fuse", f"{first}.eh_proj", "hidden", "2*hidden"),
    ]
    for j in range(MAX_PATTERN):
        name, key = f"mtp.0.block.{j}", f"mtp.layers.{j}"
        specs.append(blocks.norm(f"{name}.norm", f"{key}.norm", when=(f"p{j}",)))
        specs += blocks.gqa(f"{name}.attn", f"{key}.mixer", when=(f"p{j}_attention",))
        specs += sparse(f"{name}.moe", f"{key}.mixer", f"p{j}_moe")
        specs.append(blocks.norm(f"mtp.0.out_norm.{j}", f"{key}.final_layernorm", when=(f"p{j}_last",)))
    return tuple(specs)


def sparse(name: str, key: str, flag: str) -> tuple[TensorSpec, ...]:
    when = (flag,)
    routed = blocks.named_experts(f"{name}.experts", f"{key}.experts", "", "up_proj", "down_proj", into="expert_in")
    return (
        blocks.linear(f"{name}.router", f"{key}.gate", "experts", "hidden", when),
        blocks.tensor(f"{name}.router_bias", f"{key}.gate.e_score_correction_bias", "experts", when=when),
        *(replace(spec, when=when) for spec in routed),
        blocks.linear(f"{name}.shared.up", f"{key}.shared_experts.up_proj", "shared_inter", "hidden", when),
        blocks.linear(f"{name}.shared.down", f"{key}.shared_experts.down_proj", "hidden", "shared_inter", when),
        blocks.linear(f"{name}.latent_in", f"{key}.fc1_latent_proj", "latent", "hidden", (*when, "latent")),
        blocks.linear(f"{name}.latent_out", f"{key}.fc2_latent_proj", "hidden", "latent", (*when, "latent")),
    )


def pattern(text: Mapping[str, Any]) -> list[str]:
    """Kinds of the head's layers in order; attention then experts where the config gives none that is understood."""
    given = text.get("mtp_layers_block_type") or text.get("mtp_hybrid_override_pattern")
    kinds = [KINDS.get(k, "") if isinstance(k, str) else "" for k in given] if isinstance(given, (list, str)) else []
    return kinds if 0 < len(kinds) <= MAX_PATTERN and all(kinds) else ["attention", "moe"]


def derive(text: Mapping[str, Any]) -> dict[str, int]:
    """Flags ``p{j}``, ``p{j}_attention``, ``p{j}_moe``, ``p{j}_last``, and the width that experts read."""
    kinds = pattern(text)
    flags = {f"p{j}": 1 for j in range(len(kinds))} | {f"p{j}_{kind}": 1 for j, kind in enumerate(kinds)}
    flags[f"p{len(kinds) - 1}_last"] = 1
    width = text.get("moe_latent_size") or text.get("hidden_size")
    if isinstance(width, int) and not isinstance(width, bool) and width > 0:
        flags["expert_in"] = width
    return flags


NEMOTRON_H = Family(
    name="nemotron_h",
    title="Nemotron-H / Nemotron 3",
    architectures=("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Omni_Reasoning_V3"),
    model_types=("nemotron_h", "nemotron_h_puzzle"),
    layer_count=("num_nextn_predict_layers", "text_config.num_nextn_predict_layers"),
    default_layers=None,
    head=head(),
    prefixes=("", "language_model."),
    block="a pattern of layers: full attention, then non-gated mixture of experts",
    ignored=(r".*\.rotary_emb\.inv_freq", r"(vision|audio|sound)_.*", r"mlp1\..*"),
    derive=derive,
    note="Engines run one head whose pattern holds attention and experts only; mamba and MLP layers are not laid out.",
    source="vllm/model_executor/models/nemotron_h_mtp.py; transformers/models/nemotron_h",
)
