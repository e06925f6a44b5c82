"""Read one line of training data into documents, or say in a few words why it cannot be used.

A line is an object with one of ``text``; ``messages`` (roles and contents); ``conversations`` (ShareGPT: ``from`` and
``value``); ``input_ids`` with an optional ``loss_mask``; ``documents``, a list of such objects, as `nextn regenerate`
writes where a conversation is not one text. Beside it, optionally: ``domain``, ``tools``, ``chat_template_kwargs``.
Where ids stand beside messages, the ids count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nextn.checkpoint.jsonfile import parse_json
from nextn.errors import NextnError
from nextn.train.masks import ChatTokenizer, chat_documents
from nextn.train.packing import Document

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's ``from`` -> role."""
EXAMPLES = 5


class MalformedError(Exception):
    """A line that cannot be used; the message is the reason, the same for all lines of a kind."""


@dataclass
class DataReport:
    """What reading found, over the lines seen so far; each line counts once, however many epochs.

    Attributes:
        lines: read.
        documents, tokens, loss_tokens: that they gave, before packing.
        malformed: reason -> lines that were not used.
        examples: ``file:line: reason`` of the first few of them.
        without_loss: lines that hold no token that a head could learn to predict.
        truncated: documents cut at the longest length.
        unlocated: assistant turns that are not predicted (see `masks.Chat`).
        thinking_dropped: assistant turns whose thinking the chat template leaves out.
    """

    lines: int = 0
    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    malformed: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    without_loss: int = 0
    truncated: int = 0
    unlocated: int = 0
    thinking_dropped: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def reject(self, reason: str, where: str) -> None:
        """Count a malformed line."""
        self.malformed[reason] = self.malformed.get(reason, 0) + 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{where}: {reason}")

    def summary(self) -> list[str]:
        """Lines of text for a screen: what was read, then what was not used and why."""
        out = [f"{self.lines} lines, {self.documents} documents, {self.tokens} tokens, {self.loss_tokens} to predict"]
        if self.malformed:
            out.append(f"{sum(self.malformed.values())} malformed lines, not used:")
            out += [f"  {count} x {reason}" for reason, count in sorted(self.malformed.items(), key=lambda x: -x[1])]
            out += [f"  e.g. {example}" for example in self.examples]
        for count, what in (
            (self.without_loss, "lines without a token to predict"),
            (self.truncated, "documents cut at max_length"),
            (self.unlocated, "assistant turns not predicted: no prompt before them, or none that the template keeps"),
            (self.thinking_dropped, "assistant turns whose thinking the chat template leaves out"),
        ):
            if count:
                out.append(f"{count} {what}")
        return out


class LineReader:
    """Reads lines for one model.

    Args:
        tokenizer: None for a model without one, which can read ``input_ids`` alone.
        vocab: ids are below this.
        eos_ids: ids that end an assistant's turn.
        max_length: longest document; None is no limit. Text that may be predicted throughout is cut into pieces of
            this length, other documents at their end.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer | None,
        *,
        vocab: int,
        eos_ids: Collection[int] = (),
        max_length: int | None = None,
    ) -> None:
        self.tokenizer, self.vocab, self.eos_ids, self.max_length = tokenizer, vocab, frozenset(eos_ids), max_length

    def read(self, raw: bytes, report: DataReport) -> list[Document]:
        """Documents of a line that hold something to predict; counts into `report` what it cuts or leaves out.

        Raises:
            MalformedError: the line cannot be used.
            NextnError: no line of this kind can: the model has no tokenizer or no chat template.
        """
        line = parse_line(raw)
        domain = line.get("domain", "")
        if not isinstance(domain, str):
            raise MalformedError("domain is not text")
        pieces = [piece for ids, mask in self._texts(line, report) for piece in self._cut(ids, mask, report)]
        documents = [Document(ids, mask, domain) for ids, mask in pieces]
        useful = [d for d in documents if d.predictable()]
        report.without_loss += not useful
        report.documents += len(useful)
        report.tokens += sum(len(d.ids) for d in useful)
        report.loss_tokens += sum(d.predictable() for d in useful)
        return useful

    def _texts(self, line: Mapping[str, Any], report: DataReport) -> list[tuple[Sequence[int], Sequence[bool]]]:
        if "documents" in line:
            parts = line["documents"]
            if not isinstance(parts, list) or not all(isinstance(p, dict) and "input_ids" in p for p in parts):
                raise MalformedError("documents is not a list of objects with input_ids")
            return [self._ids(part) for part in parts]
        if "input_ids" in line:
            return [self._ids(line)]
        if "messages" in line or "conversations" in line:
            return self._chat(line, report)
        if "text" in line:
            if not isinstance(line["text"], str) or not line["text"]:
                raise MalformedError("text is not text, or empty")
            ids = self._tokenizer().encode(line["text"])
            self._check_ids(ids)
            return [(ids, [True] * len(ids))]
        raise MalformedError("none of text, messages, conversations, input_ids")

    def _tokenizer(self) -> ChatTokenizer:
        if self.tokenizer is None:
            raise NextnError("The model ships no tokenizer.", "Give data lines with `input_ids`.")
        return self.tokenizer

    def _check_ids(self, ids: Any) -> None:
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise MalformedError("input_ids is not a list of ids, or empty")
        if min(ids) < 0 or max(ids) >= self.vocab:
            raise MalformedError(f"an id is outside the vocabulary of {self.vocab}")

    def _ids(self, line: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        ids = line["input_ids"]
        self._check_ids(ids)
        mask = line.get("loss_mask")
        if mask is None:
            return ids, [True] * len(ids)
        if not isinstance(mask, list) or not all(m in (0, 1) for m in mask):
            raise MalformedError("loss_mask is not a list of 0 and 1")
        if len(mask) != len(ids):
            raise MalformedError("loss_mask and input_ids differ in length")
        return ids, [bool(m) for m in mask]

    def _chat(self, line: Mapping[str, Any], report: DataReport) -> list[tuple[Sequence[int], Sequence[bool]]]:
        messages = conversation(line)
        tokenizer = self._tokenizer()
        if not tokenizer.has_chat_template:
            raise NextnError(
                "The model has no chat template, and the data holds conversations.",
                "Give lines with `text` or `input_ids`, or add a chat_template.jinja to the model.",
            )
        try:
            chat = chat_documents(
                tokenizer,
                messages,
                eos_ids=self.eos_ids,
                tools=line.get("tools"),
                variables=line.get("chat_template_kwargs"),
            )
        except NextnError as error:
            raise MalformedError(error.what.rstrip(".")) from None
        report.unlocated += chat.unlocated
        report.thinking_dropped += chat.thinking_dropped
        for ids, _ in chat.documents:
            self._check_ids(ids)
        return [(ids, mask) for ids, mask in chat.documents]

    def _cut(
        self, ids: Sequence[int], mask: Sequence[bool], report: DataReport
    ) -> list[tuple[Sequence[int], Sequence[bool]]]:
        longest = self.max_length
        if longest is None or len(ids) <= longest:
            return [(ids, mask)]
        report.truncated += 1
        if not all(mask):
            return [(ids[:longest], mask[:longest])]
        return [(ids[at : at + longest], mask[at : at + longest]) for at in range(0, len(ids), longest)]


def parse_line(raw: bytes) -> dict[str, Any]:
    """A line's JSON object. Raises MalformedError where it is none."""
    if not raw.strip():
        raise MalformedError("empty line")
    try:
        line = parse_json(raw, "line")
    except NextnError:
        raise MalformedError("not JSON") from None
    if not isinstance(line, dict):
        raise MalformedError("not a JSON object")
    return line


def conversation(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a line with ``messages`` or ShareGPT's ``conversations``, roles in OpenAI's words.

    Raises:
        MalformedError: not a list of messages, or a speaker that nobody knows.
    """
    name = "messages" if "messages" in line else "conversations"
    given = line[name]
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) for m in given):
        raise MalformedError(f"{name} is not a list of messages, or empty")
    messages = []
    for message in given:
        if "role" not in message and "from" in message:
            role = ROLES.get(str(message["from"]).lower())
            if role is None:
                raise MalformedError("a conversation with an unknown speaker")
            message = {"role": role, "content": message.get("value")}
        if not isinstance(message.get("role"), str):
            raise MalformedError(f"a message of {name} without a role")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise MalformedError(f"a message of {name} without content")
        messages.append(message)
    return messages
