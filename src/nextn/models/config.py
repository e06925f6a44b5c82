"""The decoder that a config.json describes, in one frozen dataclass; everything the modules need, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nextn.errors import NextnError
from nextn.families.contract import Family
from nextn.families.geometry import text_config
from nextn.families.registry import declared_layers, family_geometry, find_family

Kind = Literal["full", "linear"]
FULL: Kind = "full"
LINEAR: Kind = "linear"

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
REQUIRED = ("hidden", "vocab", "layers", "heads", "kv_heads", "head_dim")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder and its head.

    Attributes:
        layer_kinds: ``full`` or ``linear`` (gated delta net), one a layer.
        sparse_layers: layers whose MLP is a mixture of experts.
        inv_freq_dim: channels of a head that rotate.
        rope: the config's rope parameters (rope_type, rope_theta, ...).
        head_layers: physical layers of the MTP head, 0 for none.
        q_gate: 2 where q_proj carries an output gate, else 1.
    """

    family: Family
    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    eps: float
    max_positions: int
    layer_kinds: tuple[Kind, ...]
    sparse_layers: tuple[bool, ...]
    rotary_dim: int
    rope: Mapping[str, Any]
    tied: bool
    q_gate: int
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    one_plus: bool
    head_layers: int
    head_sparse: bool
    experts: int = 0
    experts_per_token: int = 0
    moe_inter: int = 0
    shared_inter: int = 0
    norm_topk: bool = True
    gdn_k_heads: int = 0
    gdn_v_heads: int = 0
    gdn_k_dim: int = 0
    gdn_v_dim: int = 0
    conv: int = 0

    @property
    def full_layers(self) -> int:
        return sum(kind == "full" for kind in self.layer_kinds)

    @property
    def linear_layers(self) -> int:
        return sum(kind == "linear" for kind in self.layer_kinds)


def decoder_config(config: Mapping[str, Any], *, head_layers: int | None = None) -> DecoderConfig:
    """Read a config.json.

    Args:
        config: the parsed file.
        head_layers: layers of the head that the checkpoint really holds; None takes what is declared.
    Raises:
        NextnError: an architecture that nextn does not decode, or a field that is missing or makes no sense.
    """
    family = find_family(config)
    if family is None or not family.target:
        named = config.get("architectures") or config.get("model_type") or "nothing"
        raise NextnError(
            f"nextn cannot decode this architecture ({str(named)[:80]}).",
            "It decodes Qwen3-Next, Qwen3.5 (dense and MoE), Llama, Qwen2 and Qwen3; `nextn inspect` reads many more.",
        )
    text = text_config(config)
    dims = family_geometry(family, config)
    missing = [name for name in REQUIRED if dims.get(name, 0) <= 0]
    if missing:
        raise NextnError(f"config.json lacks {', '.join(missing)}.", "Use the checkpoint's own config.json.")
    if dims["heads"] % dims["kv_heads"]:
        raise NextnError(
            f"config.json has {dims['heads']} attention heads and {dims['kv_heads']} key-value heads, no multiple.",
            "Correct config.json.",
        )
    refuse_features(text)
    kinds = _layer_kinds(text, dims["layers"], family)
    if "linear" in kinds:
        lacking = [n for n in ("gdn_k_heads", "gdn_v_heads", "gdn_k_dim", "gdn_v_dim", "conv") if dims.get(n, 0) <= 0]
        if lacking or dims["gdn_v_heads"] % dims["gdn_k_heads"]:
            raise NextnError(
                "config.json describes its gated delta net layers incompletely.",
                "Use the checkpoint's own config.json.",
            )
    sparse = _sparse_layers(text, dims["layers"], bool(dims["moe"]))
    rope = _rope(text)
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    if factor is None:
        factor = 0.25 if "linear" in kinds or family.name.startswith("qwen3_") else 1.0
    declared, _ = declared_layers(family, config)
    if head_layers is None:
        head_layers = declared if declared is not None else (family.default_layers or 0)
    names = {spec.name for spec in family.head}
    return DecoderConfig(
        family=family,
        hidden=dims["hidden"],
        vocab=dims["vocab"],
        layers=dims["layers"],
        heads=dims["heads"],
        kv_heads=dims["kv_heads"],
        head_dim=dims["head_dim"],
        inter=dims.get("inter", 0),
        eps=float(text.get("rms_norm_eps", 1e-6)),
        max_positions=int(text.get("max_position_embeddings", 32768)),
        layer_kinds=kinds,
        sparse_layers=sparse,
        rotary_dim=int(dims["head_dim"] * float(factor)),
        rope=rope,
        tied=bool(dims["tied"]),
        q_gate=dims["q_gate"],
        qk_norm="mtp.{i}.block.attn.q_norm.weight" in names,
        qkv_bias=family.name == "qwen2" or bool(dims["attention_bias"]),
        o_bias=bool(dims["attention_bias"] and dims.get("o_bias", 0)),
        one_plus=family.norm == "one_plus",
        head_layers=head_layers,
        head_sparse=bool(dims["moe"]) and any("moe" in name for name in names),
        experts=dims.get("experts", 0),
        experts_per_token=dims.get("experts_per_token", 0),
        moe_inter=dims.get("moe_inter", 0),
        shared_inter=dims.get("shared_inter", 0),
        norm_topk=bool(text.get("norm_topk_prob", True)),
        gdn_k_heads=dims.get("gdn_k_heads", 0),
        gdn_v_heads=dims.get("gdn_v_heads", 0),
        gdn_k_dim=dims.get("gdn_k_dim", 0),
        gdn_v_dim=dims.get("gdn_v_dim", 0),
        conv=dims.get("conv", 0),
    )


def _layer_kinds(text: Mapping[str, Any], layers: int, family: Family) -> tuple[Kind, ...]:
    hybrid = any(spec.name.startswith("layers.{l}.gdn") for spec in family.target)
    if not hybrid:
        return (FULL,) * layers
    listed = text.get("layer_types")
    if listed is None:
        every = text.get("full_attention_interval", 4)
        return tuple([FULL if (i + 1) % every == 0 else LINEAR for i in range(layers)])
    short = {"full_attention": FULL, "linear_attention": LINEAR}
    if not isinstance(listed, list) or len(listed) != layers or any(kind not in short for kind in listed):
        raise NextnError(f"config.json's layer_types does not describe {layers} layers.", "Correct config.json.")
    return tuple([short[kind] for kind in listed])


def refuse_features(text: Mapping[str, Any]) -> None:
    """Raise NextnError where a config switches on what the modules do not compute.

    Sliding windows: with use_sliding_window, layers from max_window_layers on look back sliding_window positions only
    (transformers ``modeling_qwen2.py``); newer configs list such layers in layer_types.
    """
    if text.get("hidden_act", "silu") not in ("silu", "swish"):
        raise NextnError(
            f"nextn does not run the activation {str(text['hidden_act'])[:40]!r}.", "Only silu models are supported."
        )
    if text.get("mlp_bias"):
        raise NextnError("nextn does not run biases in MLPs (mlp_bias).", "Only MLPs without biases are supported.")
    kind = _rope(text)["rope_type"]
    if kind not in ROPE_TYPES:
        raise NextnError(f"nextn does not run rope_type {str(kind)[:40]!r}.", f"It runs {', '.join(ROPE_TYPES)}.")
    listed, first, layers = text.get("layer_types"), text.get("max_window_layers"), text.get("num_hidden_layers")
    by_list = isinstance(listed, list) and "sliding_attention" in listed
    some = not isinstance(first, int) or not isinstance(layers, int) or first < layers
    if by_list or (text.get("use_sliding_window") and text.get("sliding_window") and some):
        raise NextnError(
            "nextn does not run sliding-window attention, which config.json switches on.",
            "Use an engine that does; `nextn inspect` prints its command.",
        )


def _sparse_layers(text: Mapping[str, Any], layers: int, moe: bool) -> tuple[bool, ...]:
    """transformers ``modeling_qwen3_next.py``: every decoder_sparse_step-th layer, except those in mlp_only_layers."""
    every = text.get("decoder_sparse_step") or 1
    dense = set(text.get("mlp_only_layers") or ())
    return tuple(moe and i not in dense and (i + 1) % every == 0 for i in range(layers))


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rope parameters, from either spelling (``rope_parameters``, or theta and ``rope_scaling``)."""
    given = text.get("rope_parameters") or text.get("rope_scaling")
    rope = dict(given) if isinstance(given, Mapping) else {}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", text.get("rope_theta", 10000.0))
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    return rope
