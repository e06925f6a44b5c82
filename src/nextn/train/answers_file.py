"""The file that answers are appended to, one line a prompt, so that a run killed anywhere goes on where it was."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from nextn.errors import NextnError

BEGINNING = re.compile(rb'\{"line": (\d+), "digest": "([0-9a-f]{16})"')


def digest(raw: bytes, settings: Mapping[str, Any]) -> str:
    """16 hex digits of a prompt line and the settings that it is answered with."""
    told = json.dumps(settings, sort_keys=True).encode()
    return hashlib.blake2b(raw + b"\n" + told, digest_size=8).hexdigest()


class AnswersFile:
    """Answers so far, and where the next are written. Held by one process at a time.

    Args:
        path: made if absent, and gone again at the end if it is still empty. A last line that was cut while it was
            written is taken off.
        expected: digest of a prompt line by its number, None where there is no such line.
    Attributes:
        done: numbers of the prompt lines that are answered.
    Raises:
        NextnError: another process writes it, or it holds something else than answers to these prompts with these
            settings.
    """

    def __init__(self, path: Path, expected: Callable[[int], str | None]) -> None:
        self.path, self._made = path, not os.path.lexists(path)
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise NextnError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one that held it before may have removed it.
            if not os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
                raise BlockingIOError
        except OSError:
            self._file.close()
            raise NextnError(f"Another process is writing {path}.", "Wait for it, or name another file.") from None
        try:
            self.done = self._read(expected)
        except NextnError:
            self._file.close()
            raise

    def _read(self, expected: Callable[[int], str | None]) -> set[int]:
        done: set[int] = set()
        whole = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"}\n"):
                if line.endswith(b"\n"):
                    raise self._foreign()
                break
            found = BEGINNING.match(line)
            if found is None:
                raise self._foreign()
            number = int(found[1])
            if expected(number) != found[2].decode():
                raise NextnError(
                    f"{self.path} answers other prompts than these, or with other settings (its line {len(done) + 1}).",
                    "Name another file, or go back to the prompts and settings that it was begun with.",
                )
            done.add(number)
            whole += len(line)
        self._file.truncate(whole)
        return done

    def _foreign(self) -> NextnError:
        return NextnError(f"{self.path} is there and is not a file of answers.", "Name another file.")

    def append(self, number: int, digest: str, answer: Mapping[str, Any]) -> None:
        """Write one line, at once."""
        line = json.dumps({"line": number, "digest": digest, **answer}, ensure_ascii=False)
        raw = line.encode("utf-8", "replace") + b"\n"
        try:
            written = os.write(self._file.fileno(), raw)
        except OSError as error:
            raise NextnError(
                f"{self.path} cannot be written: {error.strerror}.", "Make room, then run again."
            ) from None
        if written != len(raw):
            raise NextnError(f"{self.path} could only be written in part.", "Make room, then run again.")
        self.done.add(number)

    def count(self) -> int:
        """Answers in the file, also one whose `append` was interrupted after it was written."""
        with self.path.open("rb") as file:
            return sum(1 for _ in file)

    def __enter__(self) -> AnswersFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made and not os.fstat(self._file.fileno()).st_size:
            self.path.unlink(missing_ok=True)
        self._file.close()
