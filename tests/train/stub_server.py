"""A small OpenAI-compatible server whose moods a test sets."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub(ThreadingHTTPServer):
    """Answers ``echo: <last message>`` after `delay` seconds.

    Attributes:
        ids: ``vllm``, ``sglang``: where token ids are put; None refuses to be asked for them.
        failures: status codes to answer first, one a request; 0 drops the connection.
        failure_body: sent with these instead of a message.
        retry_after: status code -> the header of that name.
        asked: requests answered, by what they asked.
        bodies: what was sent.
        most: requests that were open at once.
        odd: changes an answer before it is sent, or gives the bytes to send instead.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ids: str | None = "vllm"
        self.failures: list[int] = []
        self.failure_body: bytes | None = None
        self.retry_after = {429: "7"}
        self.delay = 0.0
        self.models = ["stub"]
        self.key: str | None = None
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.most = self.open = 0
        self.odd: Callable[[dict[str, Any]], bytes | None] | None = None
        self.lock = threading.Lock()
        self.wake = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"data": [{"id": name} for name in self.server.models]})
        else:
            self._send(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.open += 1
            server.most = max(server.most, server.open)
            failure = server.failures.pop(0) if server.failures else None
        server.wake.wait(server.delay)
        with server.lock:
            server.open -= 1  # Before the client knows, who may ask again at once.
        if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
            self._send(401, {"error": {"message": "wrong key"}})
        elif failure == 0:
            self.connection.close()
        elif failure is not None:
            self._send(failure, server.failure_body or {"error": {"message": f"mood {failure}"}})
        elif "return_token_ids" in body and server.ids is None:
            self._send(400, {"error": {"message": "Unrecognized request argument: return_token_ids"}})
        else:
            self._answer(body)

    def _answer(self, body: dict[str, Any]) -> None:
        chat = self.path == "/v1/chat/completions"
        said = body["messages"][-1]["content"] if chat else str(body["prompt"])
        if "too long" in said:
            self._send(400, {"error": {"message": "context length exceeded"}})
            return
        if chat and "silent" in said:
            self._send(200, {"choices": [{"message": {"role": "assistant", "content": None}}]})
            return
        with self.server.lock:
            self.server.asked[said] += 1
        text = f"echo: {said}"
        choice: dict[str, Any] = {"finish_reason": "length" if "cut" in said else "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        told: dict[str, Any] = {"choices": [choice], "usage": {"completion_tokens": len(text)}}
        if body.get("return_token_ids"):
            prompt = [ord(c) for m in body["messages"] for c in m["content"]] if chat else [ord(c) for c in said]
            if self.server.ids == "vllm":
                told["prompt_token_ids"], choice["token_ids"] = prompt, [ord(c) for c in text]
            else:
                choice["prompt_token_ids"], choice["response_token_ids"] = prompt, [ord(c) for c in text]
        raw = self.server.odd(told) if self.server.odd is not None else None
        self._send(200, told if raw is None else raw)

    def _send(self, status: int, value: dict[str, Any] | bytes) -> None:
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        if status in self.server.retry_after:
            self.send_header("Retry-After", self.server.retry_after[status])
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def stub_server() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.wake.set()
        server.shutdown()
        server.server_close()
