"""Collect the corpus: the sources and help texts of the Python standard library of the running interpreter.

The order of documents and their split into training and held-out text depend on relative paths alone, so that the
same interpreter gives the same corpus everywhere. Run as ``python -m recipes.tiny.corpus`` to print its figures.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_OUT_PERCENT = 3
EXCLUDED = re.compile(
    r"(site-packages|__pycache__|config-[^/]*|lib-dynload|ensurepip/_bundled|encodings|lib2to3/tests/data"
    r"|test/test_asyncio/certdata|test/certdata)/|_sysconfigdata"
)
"""Not part of the library's own sources, generated, or tables of characters."""
TOPICS = "pydoc_data/topics.py"
LONGEST_LINE = 1000
LEAST_WORDS = 0.6
"""Share of letters and white space below which a file is a table rather than text."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text.

    Attributes:
        path: relative to the library's folder; help topics are ``pydoc_data/topics.py#name``.
    """

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether this text is kept from training: a fixed share of all paths, chosen by their hash."""
        return int.from_bytes(hashlib.sha256(self.path.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def collect(root: Path) -> list[Document]:
    """All documents under a library folder, in the order of their paths, without tables and duplicates."""
    found: list[Document] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if EXCLUDED.search(name):
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if name == TOPICS:
            found.extend(help_topics(text))
        elif readable(text) and text not in seen:
            seen.add(text)
            found.append(Document(name, text))
    return found


def readable(text: str) -> bool:
    """Whether a file is text that people wrote: words rather than tables, no data packed into endless lines."""
    if not text.strip() or "\0" in text or max(map(len, text.splitlines())) > LONGEST_LINE:
        return False
    return sum(c.isalpha() or c.isspace() for c in text) >= LEAST_WORDS * len(text)


def help_topics(source: str) -> Iterator[Document]:
    """The texts of ``help()``, which the library keeps as one dictionary literal."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            for name, text in sorted(ast.literal_eval(node.value).items()):
                yield Document(f"{TOPICS}#{name}", text)


def questions(document: Document) -> Iterator[tuple[str, str]]:
    """(first paragraph of a docstring, source of that function or method), for every documented one of a file."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return
    lines = document.text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and node.end_lineno is not None:
                asked = " ".join(doc.split("\n\n")[0].split())
                body = lines[node.lineno - 1 : node.end_lineno]
                yield asked, "".join(line[node.col_offset :] if line.strip() else "\n" for line in body).rstrip()


def figures(documents: list[Document]) -> dict[str, Any]:
    """What identifies a corpus: Python version, counts, and a hash over all paths and texts."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.path}\0{document.text}\0".encode())
    held_out = [d for d in documents if d.held_out]
    return {
        "python": platform.python_version(),
        "licence": "PSF-2.0",
        "documents": len(documents),
        "bytes": sum(len(d.text.encode()) for d in documents),
        "held_out_documents": len(held_out),
        "held_out_bytes": sum(len(d.text.encode()) for d in held_out),
        "sha256": digest.hexdigest(),
    }


if __name__ == "__main__":
    print(json.dumps(figures(collect(standard_library())), indent=2))
