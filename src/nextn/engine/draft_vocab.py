"""A reduced vocabulary for drafting: the head's output projection over some ids only, the most frequent of a text.

The projection is the largest product of a head pass, and most of its rows are for ids that are hardly ever right
(FR-Spec, arXiv 2502.14856). An id outside is never drafted: its draft probability is zero, so acceptance by rejection
sampling leaves the target's law as it is, and greedy verification compares with the target's own choice anyway.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch
from torch import Tensor

from nextn.checkpoint.draft_ids import listed_ids
from nextn.checkpoint.jsonfile import read_json
from nextn.engine.text import Tokenizer
from nextn.errors import NextnError
from nextn.kernels.linear import linear
from nextn.models.decoder import Drafter

TOKEN_ORDER = "token_order.json"
"""A checkpoint's own list of ids, the most frequent first."""
LONGEST_ID = 18
"""Digits: what a 64-bit id can have."""


@dataclass(frozen=True)
class DraftVocab:
    """The ids that can be drafted.

    Attributes:
        ids: [n] int64, ascending.
        weight: [n, hidden], their rows of the output projection.
        width: ids of the full vocabulary.
    """

    ids: Tensor
    weight: Tensor
    width: int

    @classmethod
    def gather(cls, drafter: Drafter, ids: Iterable[int]) -> DraftVocab:
        """Copy the rows of `ids` from a drafter's output projection.

        Raises:
            NextnError: no ids, or ids outside the vocabulary.
        """
        weight = drafter.output_weight.detach()
        chosen = checked_ids(ids, weight.shape[0])
        at = torch.tensor(chosen, device=weight.device)
        return cls(at, weight[at].contiguous(), weight.shape[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., width], minus infinity for the ids outside."""
        return self.widen(linear(hidden, self.weight))

    def widen(self, reduced: Tensor) -> Tensor:
        """Logits of the ids [..., n] -> of all ids [..., width]."""
        full = reduced.new_full((*reduced.shape[:-1], self.width), -torch.inf)
        return full.index_copy_(-1, self.ids, reduced)


def checked_ids(ids: Iterable[int], vocab: int) -> list[int]:
    """Ids in ascending order, each once.

    Raises:
        NextnError: none, or one outside the vocabulary.
    """
    given = list(ids)
    if not all(isinstance(i, Integral) and not isinstance(i, bool) for i in given):
        raise NextnError("The draft vocabulary holds something else than whole numbers.", "Give token ids.")
    chosen = sorted({int(i) for i in given})
    if not chosen:
        raise NextnError("The draft vocabulary is empty.", "Name at least one token id.")
    odd = next((i for i in chosen if not 0 <= i < vocab), None)
    if odd is not None:
        raise NextnError(f"The draft vocabulary names id {odd}; the vocabulary has {vocab}.", "Name ids of this model.")
    return chosen


def read_ids(path: Path) -> list[int]:
    """Ids of a file: a JSON list, whole numbers with spaces, commas or line breaks between, or ``draft_vocab.json``.

    Raises:
        NextnError: the file cannot be read or holds something else.
    """
    text = _text(path)
    if text.lstrip().startswith("{"):
        return listed_ids(read_json(path), str(path))
    numbers = re.findall(r"\d+", text)
    if not re.fullmatch(r"\s*\[?[\d\s,]*\]?\s*", text) or max(map(len, numbers), default=0) > LONGEST_ID:
        raise NextnError(f"{path} holds something else than token ids.", "Give a JSON list of whole numbers.")
    return [int(number) for number in numbers]


def frequent_ids(ids: Iterable[int], count: int, *, always: Iterable[int] = (), vocab: int) -> list[int]:
    """The `count` most frequent of a text's ids, `always` among them; lower ids first where the text has too few.

    Raises:
        NextnError: a count outside 1 .. vocab, or less than `always` takes.
    """
    order = [i for i, _ in sorted(Counter(ids).items(), key=lambda item: (-item[1], item[0]))]
    return first_ids(order, count, always=always, vocab=vocab)


def first_ids(order: Iterable[int], count: int, *, always: Iterable[int] = (), vocab: int) -> list[int]:
    """The first `count` ids of `always`, then of an order, then of the vocabulary; errors as `frequent_ids`."""
    needed = list(dict.fromkeys(always))
    if not max(1, len(needed)) <= count <= vocab:
        raise NextnError(
            f"A draft vocabulary of {count} does not fit: end tokens take {len(needed)}, the vocabulary has {vocab}.",
            f"Give a whole number from {max(1, len(needed))} to {vocab}.",
        )
    return list(dict.fromkeys([*needed, *order, *range(vocab)]))[:count]


def calibrated_ids(
    count: int, *, text: Path | None, tokenizer: Tokenizer | None, folder: Path, always: Sequence[int], vocab: int
) -> list[int]:
    """The ids to draft from, by a calibration text or by the checkpoint's own order of tokens.

    Args:
        count: how many.
        text: a text like those to be generated; None takes `TOKEN_ORDER` of the folder.
        tokenizer: of the checkpoint.
        folder: the checkpoint.
        always: ids to include, such as those that end a text.
        vocab: ids in all.
    Raises:
        NextnError: neither a text nor an order of tokens, or no tokenizer for a text.
    """
    if text is None:
        order = folder / TOKEN_ORDER
        if not order.is_file():
            raise NextnError(
                f"{folder} carries no {TOKEN_ORDER}, so its frequent tokens are not known.",
                "Give a text like those to be generated: --draft-vocab-text FILE.",
            )
        return first_ids(read_ids(order), count, always=always, vocab=vocab)
    if tokenizer is None:
        raise NextnError(f"{folder} ships no tokenizer, so a text cannot be encoded.", "Give a file of token ids.")
    ids = tokenizer.encode(_text(text), special=False)
    if not ids:
        raise NextnError(f"{text} is empty.", "Give a text like those to be generated.")
    return frequent_ids(ids, count, always=always, vocab=vocab)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise NextnError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from None
    except UnicodeDecodeError:
        raise NextnError(f"{path} is not UTF-8 text.", "Convert it.") from None
