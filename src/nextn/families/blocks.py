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


def gqa(
    name: str,
    key: str,
    *,
    qk_norm: bool | str = False,
    bias: bool = False,
    when: tuple[str, ...] = (),
    sizes: str = "",
) -> Specs:
    """Grouped-query attention; q_proj is ``q_gate`` times as wide (output gate).

    Args:
        qk_norm: a norm a head on queries and keys; a string is the flag that decides.
        bias: biases on q, k, v whatever the config says.
        sizes: prefix of the dimensions, ``swa_`` for sliding-window layers with heads of their own.
    """
    heads, kv_heads, head_dim, v_dim = (f"{sizes}{d}" for d in ("heads", "kv_heads", "head_dim", "v_head_dim"))
    specs = [
        linear(f"{name}.q", f"{key}.q_proj", f"{heads}*{head_dim}*q_gate", "hidden", when),
        linear(f"{name}.k", f"{key}.k_proj", f"{kv_heads}*{head_dim}", "hidden", when),
        linear(f"{name}.v", f"{key}.v_proj", f"{kv_heads}*{v_dim}", "hidden", when),
        linear(f"{name}.o", f"{key}.o_proj", "hidden", f"{heads}*{v_dim}", when),
    ]
    if qk_norm:
        asked = (*when, qk_norm) if isinstance(qk_norm, str) else when
        specs += [
            norm(f"{name}.q_norm", f"{key}.q_norm", head_dim, asked),
            norm(f"{name}.k_norm", f"{key}.k_norm", head_dim, asked),
        ]
    gate = when if bias else (*when, "attention_bias")
    specs += [
        tensor(f"{name}.q.bias", f"{key}.q_proj.bias", f"{heads}*{head_dim}*q_gate", when=gate),
        tensor(f"{name}.k.bias", f"{key}.k_proj.bias", f"{kv_heads}*{head_dim}", when=gate),
        tensor(f"{name}.v.bias", f"{key}.v_proj.bias", f"{kv_heads}*{v_dim}", when=gate),
        tensor(f"{name}.o.bias", f"{key}.o_proj.bias", "hidden", when=(*when, "attention_bias", "o_bias")),
    ]
    return tuple(specs)


def mla(name: str, key: str, *, indexer: bool = False, when: tuple[str, ...] = ()) -> Specs:
    """Multi-head latent attention (DeepSeek V2 on), with or without low-rank queries as ``q_lora`` says.

    `indexer` adds the sparse-attention indexer of DeepSeek V3.2, for configs that give ``index_heads``.
    """
    low, full = (*when, "q_lora"), (*when, "!q_lora")
    qk = "heads*qk_nope+heads*qk_rope"
    specs = [
        linear(f"{name}.q_a", f"{key}.q_a_proj", "q_lora", "hidden", low),
        norm(f"{name}.q_a_norm", f"{key}.q_a_layernorm", "q_lora", low),
        linear(f"{name}.q_b", f"{key}.q_b_proj", qk, "q_lora", low),
        linear(f"{name}.q", f"{key}.q_proj", qk, "hidden", full),
        linear(f"{name}.kv_a", f"{key}.kv_a_proj_with_mqa", "kv_lora+qk_rope", "hidden", when),
        norm(f"{name}.kv_a_norm", f"{key}.kv_a_layernorm", "kv_lora", when),
        linear(f"{name}.kv_b", f"{key}.kv_b_proj", "heads*qk_nope+heads*v_head_dim", "kv_lora", when),
        linear(f"{name}.o", f"{key}.o_proj", "hidden", "heads*v_head_dim", when),
    ]
    if indexer:
        sparse, at, to = (*when, "index_heads"), f"{key}.indexer", f"{name}.index"
        specs += [
            linear(f"{to}.q_b", f"{at}.wq_b", "index_heads*index_dim", "q_lora", sparse),
            linear(f"{to}.k", f"{at}.wk", "index_dim", "hidden", sparse),
            norm(f"{to}.k_norm", f"{at}.k_norm", "index_dim", sparse),
            tensor(f"{to}.k_norm.bias", f"{at}.k_norm.bias", "index_dim", when=sparse),
            linear(f"{to}.weights", f"{at}.weights_proj", "index_heads", "hidden", sparse),
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


def named_experts(
    name: str, key: str, gate: str, up: str, down: str, inter: str = "moe_inter", into: str = "hidden"
) -> Specs:
    """Split experts under other names than gate_proj, up_proj, down_proj (``w1``, ``w3``, ``w2``); no `gate` if ""."""
    parts = (("gate", gate, (inter, into)), ("up", up, (inter, into)), ("down", down, (into, inter)))
    return tuple(
        TensorSpec(f"{name}.{{e}}.{ours}.weight", f"{key}.{{e}}.{theirs}.weight", shape, experts="split")
        for ours, theirs, shape in parts
        if theirs
    )


def routed_moe(name: str, key: str, *, bias: str = "gate.e_score_correction_bias", gate: str = "gate") -> Specs:
    """DeepSeek's sparse block: sigmoid router with a correction bias, routed experts, shared experts as one MLP."""
    return (
        linear(f"{name}.router", f"{key}.{gate}", "experts", "hidden"),
        tensor(f"{name}.router_bias", f"{key}.{bias}", "experts"),
        *experts(f"{name}.experts", f"{key}.experts"),
        *mlp(f"{name}.shared", f"{key}.shared_experts", "shared_inter", ("shared_inter",)),
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


def projected_head(
    key: str,
    *,
    embed_norm: str = "enorm",
    hidden_norm: str = "hnorm",
    fuse: str = "eh_proj",
    out_norm: str = "shared_head.norm",
) -> Specs:
    """Fusion and end norm of the heads that carry them once a layer (DeepSeek's layout and its relatives)."""
    name = "mtp.{i}"
    return (
        norm(f"{name}.embed_norm", f"{key}.{embed_norm}"),
        norm(f"{name}.hidden_norm", f"{key}.{hidden_norm}"),
        linear(f"{name}.fuse", f"{key}.{fuse}", "hidden", "2*hidden"),
        norm(f"{name}.out_norm", f"{key}.{out_norm}"),
    )


def copies(key: str, embed: str = "embed_tokens", head: str = "shared_head.head") -> Specs:
    """Copies of the target's embedding and output head that some exporters ship beside the head."""
    return (
        tensor("mtp.{i}.embed.weight", f"{key}.{embed}.weight", "vocab", "hidden", optional=True),
        tensor("mtp.{i}.head.weight", f"{key}.{head}.weight", "vocab", "hidden", optional=True),
    )


def layer_norms(key: str, post: str = "post_attention_layernorm") -> Specs:
    """The two norms of a pre-norm decoder layer."""
    return (
        norm("mtp.{i}.block.input_norm", f"{key}.input_layernorm"),
        norm("mtp.{i}.block.post_norm", f"{key}.{post}"),
    )
