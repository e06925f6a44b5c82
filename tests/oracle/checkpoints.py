"""Small random checkpoints of every architecture that nextn decodes, made with transformers, each with a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nextn.families.registry import family_geometry, find_family

HYBRID: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
}
MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
DENSE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_nested", "qwen3_5_moe", "llama", "qwen2", "qwen3")


def hf_model(kind: str, *, tied: bool = False, seed: int = 0, **extra: Any) -> torch.nn.Module:
    """A transformers model with weights spread enough that every parameter matters."""
    import transformers as hf

    torch.manual_seed(seed)
    common = {"tie_word_embeddings": tied, "initializer_range": 0.1, **extra}
    if kind == "qwen3_next":
        model = hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**{**HYBRID, **MOE, **common, "decoder_sparse_step": 1}))
    elif kind in ("qwen3_5", "qwen3_5_nested"):
        model = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**{**HYBRID, **common}))
    elif kind == "qwen3_5_moe":
        model = hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**{**HYBRID, **MOE, **common}))
    elif kind == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**DENSE, **common}))
    elif kind == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**{**DENSE, **common}))
    elif kind == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**{**DENSE, "head_dim": 16, **common}))
    else:
        raise ValueError(kind)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name or "bias" in name or name.endswith("A_log"):
                param.add_(torch.randn_like(param) * 0.1)
    return model.eval()


def make_checkpoint(
    folder: Path, kind: str, *, tied: bool = False, seed: int = 0, head: bool = True, **extra: Any
) -> Path:
    """Save `hf_model` to a folder and add a random head in the family's own layout.

    ``qwen3_5_nested`` is stored as published: nested ``text_config``, keys under ``model.language_model.``.
    """
    model = hf_model(kind, tied=tied, seed=seed, **extra)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    if kind == "qwen3_5_nested":
        state = {k.replace("model.", "model.language_model.", 1): v for k, v in state.items()}
        state["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": config,
            "tie_word_embeddings": tied,
        }
    if head:
        state |= random_head(config, seed)
        (config.get("text_config") or config)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_head(config: dict[str, Any], seed: int = 0, *, experts: str = "split") -> dict[str, torch.Tensor]:
    """Checkpoint key -> random tensor, for every tensor that the family's head has."""
    family = find_family(config)
    assert family is not None
    generator = torch.Generator().manual_seed(seed + 1000)
    head = {}
    for _, key, shape, spec in family.expected(family_geometry(family, config), 1, experts=experts):
        if spec.optional:
            continue
        value = torch.randn(shape, generator=generator) * 0.2
        head[key] = value + 1 if len(shape) == 1 and family.norm == "plain" else value
    return head
