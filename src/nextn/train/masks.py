"""Turn a conversation into documents in which exactly the assistant's own tokens may be predicted.

The text of a turn is what the template adds to the prompt that the model was given: render(messages up to the turn)
less render(messages before it, with the generation prompt). Many templates render an earlier turn differently once
another follows (Qwen3 and DeepSeek-R1 drop its thinking). The model never wrote that shortened turn, so it is only
context there, and the turn gets a document of its own, in which it stands last and whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nextn.errors import NextnError

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]


class ChatTokenizer(Protocol):
    """What is asked of a tokenizer here; `nextn.engine.text.Tokenizer` is one."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str: ...

    def generation_spans(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Spans: ...


@dataclass
class Chat:
    """A conversation as documents.

    Attributes:
        documents: (ids, loss mask), in the order of their last turns.
        unlocated: assistant turns that no document trains: nothing stands before them, or the template renders what
            comes before them differently once they follow.
        thinking_dropped: turns whose thinking the template leaves out even where they stand last.
    """

    documents: list[tuple[list[int], list[bool]]] = field(default_factory=list)
    unlocated: int = 0
    thinking_dropped: int = 0


def chat_documents(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    eos_ids: Collection[int],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Chat:
    """Documents of a conversation; every assistant turn is predicted in exactly one, as the model would write it.

    A turn ends with the end id that closes it, where there is one: a line break that the template puts after it is
    not generated.

    Args:
        messages: ``{"role", "content", ...}``.
        eos_ids: ids that end a turn.
        tools, variables: of the template.
    Raises:
        NextnError: no chat template, or it refuses the conversation.
    """
    chat = Chat()
    turns = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
    texts: list[tuple[str, int, Spans]] = []
    for i in reversed(turns):
        try:
            turn = _Turn(tokenizer, messages[: i + 1], tools, variables)
            begin = turn.begin()
        except NextnError:
            if i == turns[-1]:
                raise
            begin = None
        if begin is None:
            chat.unlocated += 1
            continue
        chat.thinking_dropped += not _keeps_thinking(messages[i], turn.text[begin:])
        if not texts or not texts[-1][0].startswith(turn.text):
            texts.append((turn.text, i, []))
        texts[-1][2].append((begin, len(turn.text)))
    for text, last, spans in reversed(texts):
        exact = _generated(tokenizer, messages[: last + 1], spans, tools, variables)
        chat.documents.append(_masked(tokenizer, text, exact, eos_ids))
    return chat


class _Turn:
    """The conversation up to an assistant turn, and where in its text that turn begins."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> None:
        self.tokenizer, self.messages, self.tools, self.variables = tokenizer, messages, tools, variables
        self.text = self._render(messages, prompt=False)

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        return self.tokenizer.render_chat(
            messages, tools=self.tools, generation_prompt=prompt, variables=self.variables
        )

    def begin(self) -> int | None:
        """Character at which the turn's own text begins; None where it cannot be told."""
        before = self.messages[:-1]
        if not before:
            return None
        plain, prompt = self._render(before, prompt=False), self._render(before, prompt=True)
        if prompt != plain and self.text.startswith(prompt):
            return len(prompt)
        if not self.text.startswith(plain):
            return None
        # The template knows no generation prompt, or one that this turn does not follow (an opened <think>): the
        # turn's header is what stays when the turn says something else.
        said = str(self.messages[-1].get("content") or "").lstrip()
        other = {"role": "assistant", "content": "B" if said.startswith("A") else "A"}
        pairs = zip(self.text, self._render([*before, other], prompt=False), strict=False)
        header = next((at for at, (a, b) in enumerate(pairs) if a != b), 0)
        if header < len(plain):
            return None
        # A space alone is no header: the model writes it, as part of its first token.
        return header if self.text[len(plain) : header].strip() else len(plain)


def _generated(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    spans: Spans,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
) -> Spans:
    """The spans as the template's own ``{% generation %}`` blocks give them, where it has one for each turn."""
    blocks = tokenizer.generation_spans(messages, tools=tools, variables=variables)
    if len(blocks) != sum(m.get("role") == "assistant" for m in messages):
        return spans
    return [b for b in blocks if any(begin < b[1] and b[0] < end for begin, end in spans)]


def _masked(
    tokenizer: ChatTokenizer, text: str, spans: Spans, eos_ids: Collection[int]
) -> tuple[list[int], list[bool]]:
    """Ids of a text, and a mask of the tokens that begin inside a span and are not after its last end id."""
    ids, offsets = tokenizer.encode_offsets(text)
    mask = [False] * len(ids)
    for begin, end in spans:
        inside = [at for at, (start, _) in enumerate(offsets) if begin <= start < end]
        closing = next((at for at in reversed(inside) if ids[at] in eos_ids), None)
        for at in inside:
            mask[at] = closing is None or at <= closing
    return ids, mask


def _keeps_thinking(message: Message, text: str) -> bool:
    """False where the message holds thinking that the rendered turn does not."""
    content, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(thought, str) and isinstance(content, str) and "</think>" in content:
        thought = content.split("</think>")[0].rsplit("<think>", 1)[-1]
    return not isinstance(thought, str) or thought.strip() in text
