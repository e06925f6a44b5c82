"""Read ``draft_vocab.json``: the ids that a head was trained to draft, beside its weights.

`nextn train` writes it where a run has a draft vocabulary. It belongs to the head, so that it goes where the head goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nextn.checkpoint.listing import Checkpoint
from nextn.errors import NextnError

DRAFT_IDS = "draft_vocab.json"


def draft_ids(checkpoint: Checkpoint) -> list[int] | None:
    """The ids that a checkpoint's own head drafts, ascending; None where it says nothing: all.

    Raises:
        NextnError: the file is there and lists no ids.
    """
    content = checkpoint.json(DRAFT_IDS)
    return None if content is None else listed_ids(content, f"{DRAFT_IDS} of {checkpoint.source}")


def listed_ids(content: Mapping[str, Any], name: str) -> list[int]:
    """The ids of ``{"ids": [...]}``, ascending and each once.

    Args:
        name: of the file, for the error.
    Raises:
        NextnError: there are none, or something else.
    """
    ids = content.get("ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise NextnError(f"{name} lists no token ids.", 'It should hold {"ids": [0, 1, ...]}.')
    return sorted(set(ids))
