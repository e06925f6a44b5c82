"""A Llama-architecture GGUF file as what a checkpoint folder holds: config.json and dequantised tensors.

llama.cpp rotates neighbouring channels, transformers the two halves of a head, so the converter to GGUF interleaves
the rows of q and k (``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py``); here they are put back.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nextn.checkpoint.gguf import read_gguf
from nextn.errors import NextnError

if TYPE_CHECKING:
    from gguf import GGUFReader

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""GGUF names (gguf package, ``constants.py``) and transformers' (``modeling_llama.py``)."""


class LlamaFile:
    """A GGUF file of the architecture ``llama``.

    Args:
        path: of the file.
    Attributes:
        values: its metadata, lists in full.
    Raises:
        NextnError: no GGUF file, a damaged one, another architecture, or the gguf package is not installed.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("gguf") is None:
            raise NextnError("Dequantising a GGUF file needs the gguf package.", "Run `pip install gguf`.")
        from gguf import GGUFReader

        self.path = path
        _, head = read_gguf(path)  # refuses damage that the reader below would run into
        if head.get("general.architecture") != "llama":
            raise NextnError(
                f"{path.name} is of the architecture {str(head.get('general.architecture'))[:40]!r}.",
                "Only Llama's GGUF files can be turned into a folder.",
            )
        self._reader: GGUFReader = GGUFReader(path)
        self.values: dict[str, Any] = {name: field.contents() for name, field in self._reader.fields.items()}

    def required(self, name: str) -> Any:
        """A value of the metadata. Raises NextnError where the file lacks it."""
        if name not in self.values:
            raise NextnError(f"{self.path.name} does not say {name}.", "Convert it again with a current llama.cpp.")
        return self.values[name]

    def config(self) -> dict[str, Any]:
        """config.json in transformers' words.

        Raises:
            NextnError: a value that is missing, or a feature that a plain Llama has not.
        """
        refused = next((n for n in ("llama.expert_count", "llama.rope.scaling.type") if self.values.get(n)), None)
        if refused is not None:
            raise NextnError(
                f"{self.path.name} uses {refused}.", "Only plain Llama models can be turned into a folder."
            )
        hidden, heads = int(self.required("llama.embedding_length")), int(self.required("llama.attention.head_count"))
        names = {t.name for t in self._reader.tensors}
        # The file keeps 32-bit floats: 1e-05 reads back as 9.999999747378752e-06.
        eps = float(str(np.float32(self.required("llama.attention.layer_norm_rms_epsilon"))))
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(self.required("tokenizer.ggml.tokens")),
            "hidden_size": hidden,
            "intermediate_size": int(self.required("llama.feed_forward_length")),
            "num_hidden_layers": int(self.required("llama.block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.values.get("llama.attention.head_count_kv", heads)),
            "head_dim": int(self.values.get("llama.attention.key_length", hidden // heads)),
            "hidden_act": "silu",
            "max_position_embeddings": int(self.required("llama.context_length")),
            "rms_norm_eps": eps,
            "rope_theta": float(self.values.get("llama.rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in names,
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": "bfloat16",
        }
        for role in ("bos", "eos"):
            id = self.values.get(f"tokenizer.ggml.{role}_token_id")
            if id is not None:
                config[f"{role}_token_id"] = int(id)
        return config

    def weights(self, config: dict[str, Any]) -> dict[str, Tensor]:
        """Every tensor under transformers' name, in bfloat16.

        Args:
            config: from `config`.
        Raises:
            NextnError: a tensor that a plain Llama has not, one that is missing, or a type that cannot be dequantised.
        """
        from gguf import dequantize

        heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
        out: dict[str, Tensor] = {}
        for tensor in self._reader.tensors:
            key, inner = transformers_name(tensor.name), tensor.name.split(".", 2)[-1]
            if key is None:
                raise NextnError(
                    f"{self.path.name} holds the tensor {tensor.name[:80]!r}, which a plain Llama has not.",
                    "Only plain Llama models can be turned into a folder.",
                )
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise NextnError(
                    f"{self.path.name} stores {tensor.name} as {tensor.tensor_type.name}, which cannot be dequantised.",
                    "Use a file in another type, for example Q8_0.",
                ) from None
            weight = torch.from_numpy(np.array(values, dtype=np.float32))
            out[key] = (deinterleave(weight, heads[inner]) if inner in heads else weight).to(torch.bfloat16)
        lacking = next((key for key in _expected(config) if key not in out), None)
        if lacking is not None:
            raise NextnError(f"{self.path.name} holds no tensor for {lacking}.", "Download it again.")
        return out


def transformers_name(name: str) -> str | None:
    """transformers' name of a GGUF tensor; None for one that a plain Llama has not."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    block, _, rest = name.partition(".")
    number, _, inner = rest.partition(".")
    if block != "blk" or not number.isdecimal() or inner not in IN_LAYER:
        return None
    return f"model.layers.{number}.{IN_LAYER[inner]}"


def deinterleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k [heads * dim, hidden] from llama.cpp's order to transformers'.

    Row 2 i + j of a head (channel j of the pair i) becomes row j * dim / 2 + i.
    """
    rows, hidden = weight.shape
    return weight.view(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def _expected(config: dict[str, Any]) -> list[str]:
    layers = range(config["num_hidden_layers"])
    outside = [key for name, key in OUTSIDE.items() if name != "output.weight"]
    return outside + [f"model.layers.{i}.{key}" for i in layers for key in IN_LAYER.values()]
