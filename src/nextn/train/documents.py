"""Read one line of training data (`formats`) into documents, or say in a few words why it cannot be used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nextn.errors import NextnError
from nextn.train.formats import DataReport, MalformedError, conversation, parse_line
from nextn.train.masks import ChatTokenizer, chat_documents
from nextn.train.packing import Document


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
