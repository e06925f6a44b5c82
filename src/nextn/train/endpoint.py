"""Ask an OpenAI-compatible server for answers, with retries, and with token ids where it gives them."""

from __future__ import annotations

import http.client
import io
import json
import math
import random
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import partial
from typing import IO, Any

from nextn.errors import NextnError
from nextn.train.dialogue import Answer, Dialogue, RefusedError

RETRIED = frozenset({408, 409, 429})
"""HTTP status codes, beside 500 and above, after which the same request may succeed."""
LONGEST_WAIT_SECONDS = 60.0
"""Between attempts, where the server asks for none."""
LONGEST_ASKED_SECONDS = 600.0
"""Of ``Retry-After``; a server that asks for more ends the run."""
LARGEST_BODY_BYTES = 64 * 2**20
"""Of an answer."""
MOST_TOKENS = 10**9
"""That a server may count in an answer; more is no count."""
DEEPEST = 100
"""Levels of lists and objects in an answer's tool calls."""


class Endpoint:
    """A server and how to ask it. May be used from several threads.

    Args:
        url: ``http://host:8000`` or with its path, as in ``https://host/v1``.
        model: its name there; None asks the server for its only one.
        api_key: sent as a bearer token.
        options: sampling fields of the requests.
        retries: further attempts after one that failed.
        timeout_seconds: of one attempt, from the request to the last byte of the answer.
        sleep: waits between attempts.
    Raises:
        NextnError: a URL that is none, a key that no header can carry, a server that does not answer or serves no
            model.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        retries: int = 5,
        timeout_seconds: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = _address(url)
        self._headers = {"Content-Type": "application/json"}
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise NextnError(
                "The key in OPENAI_API_KEY holds a line break or another character that no key has.", "Set it anew."
            )
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._options = dict(options or {})
        self._retries, self._timeout, self._sleep = retries, timeout_seconds, sleep
        self._ids: bool | None = None
        self.model = model or self._only_model()

    def _only_model(self) -> str:
        try:
            listed = self._send("models", None)
            given = [m.get("id") if isinstance(m, dict) else None for m in listed["data"]]
        except (RefusedError, KeyError, TypeError):
            raise NextnError(f"{self.url} does not list its models.", "Name one with --served-model.") from None
        names = [name for name in given if isinstance(name, str) and name.strip() and name.isprintable()]
        if given and not names:
            raise NextnError(
                f"{self.url} lists {len(given)} models, none with a name of printable text.",
                "Name one with --served-model.",
            )
        if len(names) != 1:
            told = ", ".join(name[:80] for name in names[:8]) or "none"
            raise NextnError(f"{self.url} serves {len(names)} models ({told}).", "Name one with --served-model.")
        return names[0]

    def ask(self, dialogue: Dialogue, seed: int | None) -> Answer:
        """The answer that a dialogue waits for.

        Raises:
            RefusedError: the server refuses this prompt.
            NextnError: it does not answer at all, asks for a pause of over `LONGEST_ASKED_SECONDS`, or refuses
                everything (key, address, model).
        """
        body: dict[str, Any] = {"model": self.model, **self._options}
        if seed is not None:
            body["seed"] = seed
        if dialogue.prompt is not None:
            return _completion(self._ask("completions", {**body, "prompt": dialogue.prompt}))
        body["messages"] = dialogue.messages
        if dialogue.line.get("tools"):
            body["tools"] = dialogue.line["tools"]
        if dialogue.line.get("chat_template_kwargs"):
            body["chat_template_kwargs"] = dialogue.line["chat_template_kwargs"]
        return _chat(self._ask("chat/completions", body))

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        """Send with the request for token ids, which vLLM and SGLang know; without it once a server refuses it."""
        if self._ids is False:
            return self._send(path, body)
        try:
            told = self._send(path, {**body, "return_token_ids": True})
        except RefusedError:
            if self._ids:
                raise
            told = self._send(path, body)
            self._ids = False
            return told
        self._ids = True
        return told

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON of an answer, after as many attempts as allowed."""
        request = urllib.request.Request(
            f"{self.url}/{path}", None if body is None else json.dumps(body).encode(), self._headers
        )
        for attempt in range(self._retries + 1):
            wait = min(0.5 * 2 ** min(attempt, 10), LONGEST_WAIT_SECONDS) * (0.5 + random.random() / 2)
            until = time.monotonic() + self._timeout
            raw = b""
            try:
                with urllib.request.build_opener(_Http(until), _Https(until)).open(request) as response:
                    raw = _body(response)
                return json.loads(raw)
            except urllib.error.HTTPError as error:
                said = _reason(error)
                if error.code in (401, 403, 404):
                    raise NextnError(
                        f"{self.url}/{path} answers {error.code}: {said}.", "Check the address, the key and the model."
                    ) from None
                if error.code < 500 and error.code not in RETRIED:
                    raise RefusedError(f"{error.code}: {said}") from None
                problem = f"{error.code}: {said}"
                asked = _asked_wait(error)
                if asked > LONGEST_ASKED_SECONDS:
                    raise NextnError(
                        f"{self.url}/{path} answers {problem}, and asks to be left alone for {asked:.0f} seconds.",
                        "Run again after that: it goes on.",
                    ) from None
                wait = max(wait, asked)
            except (OSError, http.client.HTTPException) as error:
                problem = _line(str(getattr(error, "reason", None) or error)) or type(error).__name__
            except RecursionError:
                if raw.rstrip().endswith((b"]", b"}")):
                    raise RefusedError("an answer that is nested too deeply") from None
                problem = "not JSON"
            except ValueError:
                problem = "not JSON"
            if attempt < self._retries:
                self._sleep(wait)
        raise NextnError(
            f"{self.url}/{path} does not answer ({problem}).", "Check the server, then run again: it goes on."
        )


class _UntilReader(io.RawIOBase):
    """Reads a socket until a time of the monotonic clock, however little comes at a time."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, until: float) -> None:
        self._sock, self._raw, self._until = sock, raw, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._until))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _UntilResponse(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, until: float, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp: Any = io.BufferedReader(_UntilReader(sock, self.fp.detach(), until))


class _UntilHandler(urllib.request.AbstractHTTPHandler):
    """Opens connections, redirected ones too, that are given up at a time of the monotonic clock."""

    def __init__(self, until: float) -> None:
        super().__init__()
        self._until = until

    def do_open(self, http_class: Any, req: Any, **more: Any) -> Any:
        def connection(host: str, **given: Any) -> Any:
            made = http_class(host, **given)
            made.response_class = partial(_UntilResponse, until=self._until)
            return made

        req.timeout = _left(self._until)
        return super().do_open(connection, req, **more)  # type: ignore[arg-type]


class _Http(_UntilHandler, urllib.request.HTTPHandler):
    pass


class _Https(_UntilHandler, urllib.request.HTTPSHandler):
    pass


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _body(response: IO[bytes]) -> bytes:
    """All that a response holds.

    Raises:
        RefusedError: it is larger than `LARGEST_BODY_BYTES`.
        OSError, http.client.HTTPException: it ends early.
    """
    out = bytearray()
    while piece := response.read1(2**18):  # type: ignore[attr-defined]
        out += piece
        if len(out) > LARGEST_BODY_BYTES:
            raise RefusedError(f"an answer of more than {LARGEST_BODY_BYTES >> 20} MiB")
    missing = getattr(response, "length", None)
    if missing:
        raise http.client.IncompleteRead(b"", missing)
    return bytes(out)


def _line(said: str) -> str:
    """A server's words in one line of at most 200 characters, those that do not print as ``?``."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(said.split()))[:200]


def _address(url: str) -> str:
    """What requests' paths are put behind: a URL without a path gets ``/v1``."""
    like = "Give a URL like http://localhost:8000."
    none = NextnError(f"{url[:80]!r} is no address of a server.", like)
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname
    except ValueError:
        raise none from None
    known = parts.scheme in ("http", "https") and host and "@" not in parts.netloc
    if not known or re.search(r"[\x00-\x20\x7f]", url) or not parts.path.isascii():
        raise none
    if "?" in url or "#" in url:
        raise NextnError(f"{url[:80]!r} has a query or a fragment, which no path can follow.", like)
    if not _is_host(host or ""):
        raise none
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise NextnError(f"The port of {url[:80]!r} is no number from 1 to 65535.", like)
    return url.rstrip("/") if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"


def _is_host(host: str) -> bool:
    """Whether a name can be looked up: its labels are neither empty nor too long, with no escapes."""
    try:
        encoded = host.encode("idna").decode("ascii")
    except UnicodeError:
        return False
    return ":" in host or re.search(r"[\x00-\x20\x7f%/?#@:]", encoded) is None


def _reason(error: urllib.error.HTTPError) -> str:
    """What a server says with an error status, in one line."""
    try:
        body = _body(error.fp).decode("utf-8", "replace")
        told = json.loads(body)
        inner = told.get("error", told) if isinstance(told, dict) else told
        body = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (ValueError, RecursionError, RefusedError, OSError, http.client.HTTPException):
        body = str(error.reason)
    return _line(body).rstrip(".")


def _asked_wait(error: urllib.error.HTTPError) -> float:
    """Seconds of a Retry-After header, a number or a date (RFC 9110, 10.2.3); 0 without one."""
    told = error.headers.get("Retry-After", "0")
    try:
        seconds = float(told)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(told).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return seconds if 0 < seconds < math.inf else 0.0


def _chat(told: Any) -> Answer:
    choice = _choice(told)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise RefusedError("an answer without a message")
    text, calls = _text(message.get("content")), message.get("tool_calls") or None
    reasoning = message.get("reasoning_content") or message.get("reasoning") or None
    if not isinstance(reasoning, str | None):
        raise RefusedError("an answer whose reasoning is not text")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise RefusedError("an answer whose tool_calls are no list of objects")
    if _is_deep(calls):
        raise RefusedError(f"an answer whose tool_calls are nested more than {DEEPEST} levels deep")
    if text is None and not reasoning and not calls:
        raise RefusedError("an answer without content")
    return _answer(told, choice, text or "", reasoning=reasoning, tool_calls=calls)


def _completion(told: Any) -> Answer:
    choice = _choice(told)
    text = choice.get("text")
    if not isinstance(text, str):
        raise RefusedError("an answer without text")
    return _answer(told, choice, text)


def _text(content: Any) -> str | None:
    """Of a message's content: a string, a list of parts of type text, or None."""
    if isinstance(content, str | None):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(parts):
        raise RefusedError("an answer whose content is not text")
    return "".join(found)


def _is_deep(value: Any) -> bool:
    """Whether lists and objects lie in one another more than `DEEPEST` levels deep."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [v for v in level if isinstance(v, list | dict)]
        if not level:
            return False
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return True


def _choice(told: Any) -> dict[str, Any]:
    try:
        choice = told["choices"][0]
    except (KeyError, IndexError, TypeError):
        raise RefusedError("an answer without choices") from None
    if not isinstance(choice, dict):
        raise RefusedError("an answer without choices")
    return choice


def _answer(told: Any, choice: dict[str, Any], text: str, **more: Any) -> Answer:
    """vLLM gives ``prompt_token_ids`` beside the choices and ``token_ids`` in each; SGLang's chat gives both in the
    choice, the second as ``response_token_ids`` (their ``protocol.py``)."""
    usage = told.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    ids = _ids(choice.get("token_ids") or choice.get("response_token_ids"))
    return Answer(
        text,
        "length" if choice.get("finish_reason") == "length" else "stop",
        prompt_ids=_ids(choice.get("prompt_token_ids") or told.get("prompt_token_ids")),
        token_ids=ids,
        tokens=count if type(count) is int and 0 < count <= MOST_TOKENS else len(ids or ()),
        **more,
    )


def _ids(given: Any) -> list[int] | None:
    """Token ids; None where these are none, so that the text alone is kept."""
    return given if isinstance(given, list) and all(type(i) is int and i >= 0 for i in given) else None
