"""Small real tokenizers, trained here, and checkpoint folders that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The head proposes and the target disposes; what is refused is drawn again.",
    "def accept(drafts, choices): return [d for d, c in zip(drafts, choices) if d == c]",
    "Grüße aus Köln, das Mädchen aß süße Äpfel. Où est l'été? Ça va très bien, señor.",
    "日本語のテキストも少し。 Привет, мир! 👩‍🔬 🎉🎉",
] * 4

CHAT_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('Unexpected role ' + m.role + '.') }}"
    "{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if thinking %}<think>{% endif %}{% endif %}"
)

SPECIAL = ["<|end|>", "<|start|>"]


def byte_level(corpus: Iterable[str] = CORPUS) -> tokenizers.Tokenizer:
    """Byte-level BPE as in the Qwen families: any bytes can be written, and any run of ids decoded."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """BPE with ▁ for spaces and byte tokens for characters it does not know, as in the Llama 2 family.

    Its decoder takes one space off the beginning of a text, so a piece decoded alone loses its space.
    """
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, limit_alphabet=40
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for token in bytes_:
        vocab[token] = len(vocab)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_folder(
    folder: Path,
    tokenizer: tokenizers.Tokenizer,
    config: dict[str, Any] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """A checkpoint folder's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
