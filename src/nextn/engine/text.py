"""Turn text and chats into ids and back with a checkpoint's own tokenizer.

`tokenizer.json` is read by the tokenizers library alone, so that decoding starts without importing transformers.
transformers renders chat templates, and loads tokenizers whose tokenizer.json is absent or not the whole story.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from nextn.checkpoint.jsonfile import read_json
from nextn.errors import NextnError

VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
)
"""Files any of which means that a folder has a tokenizer."""

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The block of a chat template around what the model itself writes (transformers' templates)."""


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        folder: where its files are.
        config: tokenizer_config.json, {} where there is none.
    """

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer of a folder; `load_tokenizer` also takes folders without one.

        Raises:
            NextnError: files that cannot be understood.
        """
        self.folder = folder
        path = folder / "tokenizer_config.json"
        self.config: dict[str, Any] = read_json(path) if path.is_file() else {}
        self._fast = self._read_fast()

    def _read_fast(self) -> tokenizers.Tokenizer | None:
        """tokenizer.json, or None where tokenizer_config.json adds to it or contradicts it."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            fast = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise NextnError(f"{path} cannot be read: {error}.", "Download or export the tokenizer again.") from None
        # Limits that training left in the file are not the model's.
        fast.no_truncation()
        fast.no_padding()
        for id, token in self._declared_tokens():
            if fast.token_to_id(token) != id:
                return None
        ids = fast.encode("a").ids
        for flag, name, at in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", -1)):
            wanted, special = self.config.get(flag), fast.token_to_id(self.special_token(name) or "")
            if wanted is not None and bool(wanted) != (special is not None and ids[at : at + 1 or None] == [special]):
                return None
        return fast

    def _declared_tokens(self) -> list[tuple[int, str]]:
        declared = self.config.get("added_tokens_decoder")
        if not isinstance(declared, dict):
            return []
        return [
            (int(id), token["content"])
            for id, token in declared.items()
            if id.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
        ]

    @cached_property
    def _transformers(self) -> Any:
        """transformers' tokenizer. Code that a checkpoint ships is never run."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        loader = PreTrainedTokenizerFast if (self.folder / "tokenizer.json").is_file() else AutoTokenizer
        try:
            return loader.from_pretrained(str(self.folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise NextnError(
                f"The tokenizer of {self.folder} cannot be loaded: {reason}.",
                "Give token ids instead of text, or add a tokenizer.json.",
            ) from None

    def special_token(self, name: str) -> str | None:
        """A special token by its role in tokenizer_config.json: ``bos_token``, ``eos_token``, ``pad_token``."""
        token = self.config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    def token_to_id(self, token: str) -> int | None:
        """The id of one token of the vocabulary, None where it has none."""
        if self._fast is not None:
            return self._fast.token_to_id(token)
        id = self._transformers.get_vocab().get(token)
        return None if id is None else int(id)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end token that the tokenizer declares: one id or none."""
        token = self.special_token("eos_token")
        id = None if token is None else self.token_to_id(token)
        return () if id is None else (id,)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text.

        Args:
            special: add the tokens that the tokenizer puts around a text (a begin token, for some families).

        Raises:
            NextnError: text that is not Unicode, such as undecodable bytes of a command line.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise NextnError(
                f"The text is not valid Unicode at character {error.start}.", "Give the text as UTF-8."
            ) from None
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=special).ids)
        return list(self._transformers.encode(text, add_special_tokens=special, verbose=False))

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text without added special tokens, and the characters [begin, end) that each stands for.

        Raises:
            NextnError: a tokenizer that does not know where its tokens come from.
        """
        if self._fast is not None:
            encoded = self._fast.encode(text, add_special_tokens=False)
            return list(encoded.ids), list(encoded.offsets)
        try:
            given = self._transformers(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except NotImplementedError:
            raise NextnError(
                f"The tokenizer of {self.folder} does not say which characters a token stands for.",
                "Add a tokenizer.json, or give token ids.",
            ) from None
        return list(given["input_ids"]), [(int(a), int(b)) for a, b in given["offset_mapping"]]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids. Ids beyond the tokenizer's, as padded vocabularies have, are left out."""
        if self._fast is not None:
            return self._fast.decode(ids, skip_special_tokens=skip_special)
        known = [id for id in ids if id < len(self._transformers)]
        return str(self._transformers.decode(known, skip_special_tokens=skip_special))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as the text that the model was trained on, by the checkpoint's chat template.

        Args:
            messages: ``{"role": ..., "content": ...}`` and whatever else the template knows.
            tools: JSON schemas of functions.
            generation_prompt: end with the opening of the assistant's turn.
            variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            NextnError: no template, or the template refuses the messages.
        """
        tokenizer = self._transformers
        if not tokenizer.chat_template:
            raise NextnError(f"{self.folder} has no chat template.", "Give the prompt as plain text, without a chat.")
        try:
            text = tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=None if tools is None else [dict(t) for t in tools],
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **(variables or {}),
            )
        except Exception as error:  # templates raise what they like
            raise NextnError(
                f"The chat template refuses the messages: {str(error).rstrip('.')}.",
                "Check the roles, their order and the contents.",
            ) from None
        return str(text)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._transformers.chat_template)

    def generation_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[tuple[int, int]]:
        """Characters [begin, end) of `render_chat` without a generation prompt that ``{% generation %}`` encloses.

        Empty where the template has no such block.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._transformers
        given: Any = None if tools is None else [dict(t) for t in tools]
        template = tokenizer.get_chat_template(None, given)
        if GENERATION.search(template) is None:
            return []
        rendered: Any = render_jinja_template(
            conversations=[[dict(m) for m in messages]],
            tools=given,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **(variables or {})},
        )
        return [(int(a), int(b)) for a, b in rendered[1][0]]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation; arguments and errors as `render_chat`. The template brings all special tokens."""
        text = self.render_chat(messages, tools=tools, generation_prompt=generation_prompt, variables=variables)
        return self.encode(text, special=False)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, or None where it ships none.

    Raises:
        NextnError: its files cannot be understood.
    """
    if any((folder / name).is_file() for name in VOCABULARY_FILES):
        return Tokenizer(folder)
    return None
