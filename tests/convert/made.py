"""A small Llama model, its tokenizer, and the GGUF file that llama.cpp's converter would make of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
}
TEXT = ["How are you, 12 or 345? I'll say it's fine.\n\n  def f(x):\n\treturn x", "Grüße 日本語 🎉 don't we've 7"] * 3
CHAT = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"  # noqa: E501
SPECIAL = ["<unk>", "<s>", "</s>"]


def tokenizer() -> Tokenizer:
    """Byte-level BPE whose digits stand alone."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def llama(vocab: int, *, tied: bool) -> Any:
    """A transformers model whose weights bfloat16 holds exactly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab, tie_word_embeddings=tied, initializer_range=0.2, **SIZES)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            parameter.copy_(parameter.bfloat16())
    return model


def interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows as llama.cpp wants them: channel c and channel c + dim / 2 of a head stand side by side."""
    out = np.empty_like(weight)
    dim = weight.shape[0] // heads
    for head in range(heads):
        for row in range(dim):
            out[head * dim + row] = weight[head * dim + row // 2 + (row % 2) * (dim // 2)]
    return out


def write_gguf(
    path: Path,
    model: Any,
    words: Tokenizer,
    *,
    quantised: gguf.GGMLQuantizationType | None = None,
    bos: bool = False,
    values: dict[str, str] | None = None,
    tensors: dict[str, NDArray[np.float32]] | None = None,
    without: str = "",
) -> Path:
    """Write the file.

    Args:
        quantised: type of matrices; None keeps float32.
        bos: declare that a begin token comes first.
        values: text values over the usual ones; `tensors`: further tensors; `without`: a tensor left out.
    """
    import json

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_rope_freq_base(SIZES["rope_theta"])
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    state = json.loads(words.to_str())["model"]
    given = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": CHAT}
    for name, value in (given | (values or {})).items():
        writer.add_string(name, value)
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(bos)
    for key, value in [*model.state_dict().items()]:
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name, data = gguf_name(key), value.float().numpy()
        if name == without:
            continue
        if ".attn_q." in name or ".attn_k." in name:
            heads = SIZES["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
            data = interleaved(data, heads)
        if quantised is not None and data.ndim == 2:
            writer.add_tensor(name, gguf.quantize(data, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, data)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(key: str) -> str:
    """By the gguf package's own table."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    found = names.get_name(key, try_suffixes=(".weight",))
    assert found is not None
    return str(found)
