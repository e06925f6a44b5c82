"""JSON from files that nobody vouches for: size, depth and number of values are bounded before anything is built."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nextn.errors import NextnError

MAX_JSON_BYTES = 64 << 20
MAX_CONTAINERS = 1_000_000
"""Objects and lists in one document. A header spends three a tensor; the largest public checkpoints hold 200,000."""
MAX_COMMAS = 4_000_000

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes, what: str, *, unique_keys: bool = False, fix: str = "Download or export it again.") -> Any:
    """The value of a UTF-8 JSON document.

    Args:
        raw: the document.
        what: how to call it in an error, e.g. ``/models/x/config.json``.
        unique_keys: refuse an object that names a key twice (otherwise the last one wins, as in every loader).
    Raises:
        NextnError: not UTF-8, not JSON, nested too deeply, more values than any checkpoint needs, or text that
            cannot be printed (half a surrogate pair).
    """
    if raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS or raw.count(b",") > MAX_COMMAS:
        raise NextnError(f"{what} holds more values than any checkpoint needs.", fix)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique if unique_keys else None)
        if SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except DuplicateKeyError as error:
        raise NextnError(f"{what} names {str(error)[:80]!r} twice.", fix) from None
    except (ValueError, RecursionError):
        raise NextnError(f"{what} is not valid JSON.", fix) from None
    return value


class DuplicateKeyError(ValueError):
    """An object names a key twice; the message is the key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise DuplicateKeyError(name)
            seen.add(name)
    return value


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises NextnError where `parse_json` does, and for any other value."""
    value = parse_json(raw, what, fix="Correct or download it again.")
    if not isinstance(value, dict):
        raise NextnError(f"{what} does not hold a JSON object.", "Correct or download it again.")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises NextnError when unreadable, over 64 MiB, or not an object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise NextnError(f"{path} is over {MAX_JSON_BYTES >> 20} MiB.", "That is no configuration file.")
        raw = path.read_bytes()
    except OSError as error:
        raise NextnError(f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions.") from None
    return parse_object(raw, str(path))
