"""The tokenizer inside a GGUF file as tokenizer.json and tokenizer_config.json: byte-level BPE.

The words of a text are found as llama.cpp does by the name of the pre-tokenizer (``llama-vocab.cpp``): GPT-2's
pattern, for ``smollm`` after every digit was put apart.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from nextn.errors import NextnError

CONTROL, USER_DEFINED = 3, 4
"""Of ``TokenType`` in the gguf package: markers of the model, and further words found before all others."""
PRE = {"smollm": [pre_tokenizers.Digits(individual_digits=True)], "gpt-2": [], "default": []}
"""What runs before GPT-2's pattern, by ``tokenizer.ggml.pre``."""
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_files(values: dict[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    """tokenizer.json as text, and tokenizer_config.json.

    Args:
        values: metadata of the file, lists in full.
        name: of the file, for messages.
    Raises:
        NextnError: another kind of tokenizer, or an incomplete one.
    """
    kind, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in PRE:
        raise NextnError(
            f"{name} has a tokenizer of the kind {str(kind)[:40]!r}, pre-tokenizer {str(pre)[:40]!r}.",
            f"Kinds that can be written are gpt2 with {', '.join(PRE)}.",
        )
    tokens, merges = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise NextnError(f"{name} holds no vocabulary.", "Download it again.")
    types = values.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    made.pre_tokenizer = pre_tokenizers.Sequence([*PRE[pre], pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    for token, what in zip(tokens, types, strict=True):
        if what in (CONTROL, USER_DEFINED):
            added = AddedToken(token, normalized=False, special=what == CONTROL)
            made.add_special_tokens([added]) if what == CONTROL else made.add_tokens([added])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    if "llama.context_length" in values:
        config["model_max_length"] = int(values["llama.context_length"])
    for role, key in ROLES.items():
        id = values.get(f"tokenizer.ggml.{role}_token_id")
        if id is not None:
            config[key] = tokens[id]
    if values.get("tokenizer.ggml.add_bos_token"):
        bos, id = config.get("bos_token"), values.get("tokenizer.ggml.bos_token_id")
        if bos is None:
            raise NextnError(f"{name} wants a first token and does not name it.", "Convert it again.")
        first = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, id)]
        )
        made.post_processor = processors.Sequence([made.post_processor, first])
    if "tokenizer.chat_template" in values:
        config["chat_template"] = values["tokenizer.chat_template"]
    text: str = made.to_str()
    return text, config
