"""What a line of data or prompts may look like, and the count of those that do not. No torch here.

A line is an object with one of ``text``; ``messages`` (roles and contents); ``conversations`` (ShareGPT: ``from`` and
``value``); ``input_ids`` with an optional ``loss_mask``; ``documents``, a list of such objects, as `nextn regenerate`
writes where a conversation is not one text. Beside it, optionally: ``domain``, ``tools``, ``chat_template_kwargs``.
Where ids stand beside messages, the ids count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nextn.checkpoint.jsonfile import parse_json
from nextn.errors import NextnError

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


def parse_line(raw: bytes) -> dict[str, Any]:
    """A line's JSON object.

    Raises:
        MalformedError: it is none, or holds something for the chat template that no template takes.
    """
    if not raw.strip():
        raise MalformedError("empty line")
    try:
        line = parse_json(raw, "line")
    except NextnError:
        raise MalformedError(_not_json(raw)) from None
    if not isinstance(line, dict):
        raise MalformedError("not a JSON object")
    if not isinstance(line.get("tools"), list | None):
        raise MalformedError("tools is not a list")
    if not isinstance(line.get("chat_template_kwargs"), dict | None):
        raise MalformedError("chat_template_kwargs is not an object")
    return line


def _not_json(raw: bytes) -> str:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    return "not JSON"


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
