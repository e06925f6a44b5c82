"""A prompt line being answered: what to ask next, and the line of training data that its answers make.

Answers take the place of the assistant turns of a conversation, one after the other, each given the answers before
it. A turn that a tool's message follows stays as it is, since the tool answered that call and no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nextn.train.formats import MalformedError, conversation

KEPT = ("domain", "tools", "chat_template_kwargs")
"""Fields of a prompt line that its answers keep."""
SEEDS = 2**31


class RefusedError(Exception):
    """A prompt that will not be answered however often it is asked; the message is the reason."""


@dataclass(frozen=True)
class Answer:
    """What the model said.

    Attributes:
        text: None where there is no tokenizer.
        finish_reason: ``stop`` or ``length``.
        prompt_ids, token_ids: as the model had them; None where a server does not tell.
        reasoning: thinking that a server gives apart from the text.
        tool_calls: as a server gives them.
        tokens: generated, 0 where unknown.
    """

    text: str | None
    finish_reason: str
    prompt_ids: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None
    reasoning: str | None = None
    tool_calls: Sequence[Any] | None = None
    tokens: int = 0


@dataclass
class Dialogue:
    """One prompt line on its way.

    Attributes:
        number: of the line.
        line: its JSON object.
        prompt: plain text or ids to go on from; None for a conversation.
        messages: the conversation so far, answers included.
    """

    number: int
    line: Mapping[str, Any]
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    _left: list[dict[str, Any]] = field(default_factory=list)
    _answers: list[Answer] = field(default_factory=list)

    @classmethod
    def begin(cls, number: int, line: Mapping[str, Any], *, chat: bool) -> Dialogue:
        """From a line with ``messages``, ``conversations``, ``prompt``, ``text`` or ``input_ids``.

        Args:
            chat: put text to the model as a user's message.
        Raises:
            MalformedError: none of them, or a conversation that asks nothing.
        """
        if "messages" in line or "conversations" in line:
            self = cls(number, line, _left=_questions(conversation(line)))
            self._advance()
            return self
        text = line.get("prompt", line.get("text"))
        if isinstance(text, str) and text:
            if chat:
                return cls(number, line, messages=[{"role": "user", "content": text}])
            return cls(number, line, text)
        ids = line.get("input_ids")
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            mask = line.get("loss_mask")
            begins = mask.index(1) if isinstance(mask, list) and 1 in mask[1:] else len(ids)
            return cls(number, line, ids[: begins or len(ids)])
        raise MalformedError("none of messages, conversations, prompt, text, input_ids")

    @property
    def turn(self) -> int:
        """Answers so far."""
        return len(self._answers)

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return sum(a.tokens for a in self._answers)

    def take(self, answer: Answer) -> bool:
        """Add an answer; True while the conversation asks for another."""
        self._answers.append(answer)
        if self.prompt is not None:
            return False
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or ""}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = list(answer.tool_calls)
        self.messages.append(message)
        if answer.finish_reason == "length" or not self._left:
            return False
        self._advance()
        return True

    def result(self) -> dict[str, Any]:
        """The line of training data: the conversation or text, and ids wherever all answers brought theirs."""
        out: dict[str, Any] = {name: self.line[name] for name in KEPT if name in self.line}
        out["finish_reason"] = self._answers[-1].finish_reason
        if self.prompt is None:
            out["messages"] = self.messages
        elif isinstance(self.prompt, str):
            out["text"] = self.prompt + (self._answers[-1].text or "")
        documents = _documents(self._answers)
        if len(documents) == 1:
            out |= documents[0]
        elif documents:
            out["documents"] = documents
        return out

    def _advance(self) -> None:
        """Move the messages up to the next due answer."""
        while self._left:
            message = self._left.pop(0)
            if message is DUE:
                return
            self.messages.append(message)


DUE: dict[str, Any] = {"due": "answer"}
"""Stands among messages where the model is to answer."""


def _questions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        follows = messages[at + 1]["role"] if at + 1 < len(messages) else ""
        own = message["role"] == "assistant" and follows != "tool"
        if own and not out:
            raise MalformedError("a conversation that the assistant begins")
        out.append(DUE if own else message)
    if messages[-1]["role"] != "assistant":
        out.append(DUE)
    return out


def _documents(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Ids and masks of all answers: a turn whose prompt goes on from the turn before extends its document.

    Empty where an answer came without ids.
    """
    out: list[dict[str, Any]] = []
    for answer in answers:
        if answer.prompt_ids is None or answer.token_ids is None:
            return []
        prompt, said = list(answer.prompt_ids), list(answer.token_ids)
        before = out[-1]["input_ids"] if out else []
        if out and prompt[: len(before)] == before:
            mask = out.pop()["loss_mask"]
        else:
            mask = []
        mask = [*mask, *[0] * (len(prompt) - len(mask)), *[1] * len(said)]
        out.append({"input_ids": prompt + said, "loss_mask": mask})
    return out


Answered = tuple[Dialogue, str | None]
"""A dialogue that is over, and why it was refused, if it was."""


def seed_of(seed: int | None, dialogue: Dialogue) -> int | None:
    """A seed for a dialogue's next answer: the same whatever else was answered before it."""
    return None if seed is None else (seed + 1_000_003 * dialogue.number + dialogue.turn) % SEEDS
