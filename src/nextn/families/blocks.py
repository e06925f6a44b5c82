"""Decoder blocks as tables: the tensors of attention, MLP, mixture of experts and gated delta net, named once.

Each function takes the canonical prefix and the checkpoint prefix and returns the tensors of that block. Families
put their layouts together from these.
"""

from __future__ import annotations

from dataclasses import replace

from nextn.families.contract import TensorSpec

Specs = tuple[TensorSpec, ...]


def tensor(name: str, key: str, *shape: str, when: tuple[str, ...] = (), optional: bool = False) -> TensorSpec:
    """A single tensor; ``.weight`` is not implied."""
    return TensorSpec(name, key, shape, when, optional)


def norm(name: str, key: str, width: str = "hidden", when: tuple[str, ...] = (), optional: bool = False) -> TensorSpec:
    """The weight of a root-mean-square norm."""
    return TensorSpec(f"{name}.weight", f"{key}.weight", (width,), when, optional)


def linear(name: str, key: str, out: str, into: str, when: tuple[str, ...] = (), optional: bool = False) -> TensorSpec:
    """The weight [out, in] of a linear layer."""
    return TensorSpec(f"{name}.weight", f"{key}.weight", (out, into), when, optional)


def gqa(name: str, key: str, *, qk_norm: bool, bias: bool = False, when: tuple[str, ...] = ()) -> Specs:
    """Grouped-query attention; with `qk_norm` a norm a head; q_proj is ``q_gate`` times as wide (output gate)."""
    specs = [
        linear(f"{name}.q", f"{key}.q_proj", "heads*head_dim*q_gate", "hidden", when),
        linear(f"{name}.k", f"{key}.k_proj", "kv_heads*head_dim", "hidden", when),
        linear(f"{name}.v", f"{key}.v_proj", "kv_heads*v_head_dim", "hidden", when),
        linear(f"{name}.o", f"{key}.o_proj", "hidden", "heads*v_head_dim", when),
    ]
    if qk_norm:
        specs += [
            norm(f"{name}.q_norm", f"{key}.q_norm", "head_dim", when),
            norm(f"{name}.k_norm", f"{key}.k_norm", "head_dim", when),
        ]
    gate = when if bias else (*when, "attention_bias")
    specs += [
        tensor(f"{name}.q.bias", f"{key}.q_proj.bias", "heads*head_dim*q_gate", when=gate),
        tensor(f"{name}.k.bias", f"{key}.k_proj.bias", "kv_heads*head_dim", when=gate),
        tensor(f"{name}.v.bias", f"{key}.v_proj.bias", "kv_heads*v_head_dim", when=gate),
        tensor(f"{name}.o.bias", f"{key}.o_proj.bias", "hidden", when=(*when, "attention_bias", "o_bias")),
    ]
    return tuple(specs)


def mlp(name: str, key: str, inter: str = "inter", when: tuple[str, ...] = ()) -> Specs:
    """SwiGLU: gate, up, down."""
    return (
        linear(f"{name}.gate", f"{key}.gate_proj", inter, "hidden", when),
        linear(f"{name}.up", f"{key}.up_proj", inter, "hidden", when),
        linear(f"{name}.down", f"{key}.down_proj", "hidden", inter, when),
    )


def experts(name: str, key: str, inter: str = "moe_inter", when: tuple[str, ...] = ()) -> Specs:
    """Routed experts in both storages: one tensor an expert (split), or stacked (grouped)."""
    return (
        *(replace(s, experts="split") for s in mlp(f"{name}.{{e}}", f"{key}.{{e}}", inter, when)),
        TensorSpec(
            f"{name}.gate_up", f"{key}.gate_up_proj", ("experts", f"2*{inter}", "hidden"), when, experts="grouped"
        ),
        TensorSpec(f"{name}.down", f"{key}.down_proj", ("experts", "hidden", inter), when, experts="grouped"),
    )


def qwen_moe(name: str, key: str, when: tuple[str, ...] = ()) -> Specs:
    """Qwen's sparse block: softmax router, routed experts, one shared expert with a sigmoid gate."""
    return (
        linear(f"{name}.router", f"{key}.gate", "experts", "hidden", when),
        *experts(f"{name}.experts", f"{key}.experts", when=when),
        *mlp(f"{name}.shared", f"{key}.shared_expert", "shared_inter", (*when, "shared_inter")),
        linear(f"{name}.shared_gate", f"{key}.shared_expert_gate", "one", "hidden", (*when, "shared_inter")),
    )


def gdn(name: str, key: str, *, fused: bool, when: tuple[str, ...] = ()) -> Specs:
    """Gated delta net. Qwen3-Next stores its input projections fused, Qwen3.5 apart."""
    k, v = "gdn_k_heads*gdn_k_dim", "gdn_v_heads*gdn_v_dim"
    if fused:
        inputs: Specs = (
            linear(f"{name}.in_qkvz", f"{key}.in_proj_qkvz", f"2*{k}+2*{v}", "hidden", when),
            linear(f"{name}.in_ba", f"{key}.in_proj_ba", "2*gdn_v_heads", "hidden", when),
        )
    else:
        inputs = (
            linear(f"{name}.in_qkv", f"{key}.in_proj_qkv", f"2*{k}+{v}", "hidden", when),
            linear(f"{name}.in_z", f"{key}.in_proj_z", v, "hidden", when),
            linear(f"{name}.in_b", f"{key}.in_proj_b", "gdn_v_heads", "hidden", when),
            linear(f"{name}.in_a", f"{key}.in_proj_a", "gdn_v_heads", "hidden", when),
        )
    return (
        *inputs,
        tensor(f"{name}.conv.weight", f"{key}.conv1d.weight", f"2*{k}+{v}", "one", "conv", when=when),
        tensor(f"{name}.dt_bias", f"{key}.dt_bias", "gdn_v_heads", when=when),
        tensor(f"{name}.a_log", f"{key}.A_log", "gdn_v_heads", when=when),
        norm(f"{name}.norm", f"{key}.norm", "gdn_v_dim", when),
        linear(f"{name}.out", f"{key}.out_proj", "hidden", v, when),
    )


def concat_head(key: str) -> Specs:
    """Fusion and end norm of the ``mtp.`` layout (Qwen3-Next, Qwen3.5, EXAONE): once a head, not once a layer."""
    return (
        norm("mtp.0.embed_norm", f"{key}.pre_fc_norm_embedding"),
        norm("mtp.0.hidden_norm", f"{key}.pre_fc_norm_hidden"),
        linear("mtp.0.fuse", f"{key}.fc", "hidden", "2*hidden"),
        norm("mtp.0.out_norm", f"{key}.norm"),
    )
