"""The target answers prompts itself, locally or through a server, each once, whatever interrupts it."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nextn.api import Model, generate, load
from nextn.cli import main
from nextn.errors import NextnError
from nextn.train.answers_file import AnswersFile, digest
from nextn.train.dialogue import Answer, Dialogue, RefusedError, seed_of
from nextn.train.documents import LineReader
from nextn.train.endpoint import Endpoint
from nextn.train.endpoint_answers import answer_remotely
from nextn.train.formats import DataReport, MalformedError
from nextn.train.local_answers import answer_locally
from tests.engine.tokenizers_made import byte_level, write_folder
from tests.oracle.checkpoints import make_checkpoint
from tests.train.chats import OPENED, PLAIN
from tests.train.stub_server import Stub, stub_server


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def run(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["regenerate", *words])
    assert (ended.value.code or 0) == code


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


# Dialogues


def test_answers_replace_the_assistants_turns_one_by_one() -> None:
    line = {
        "messages": [{"role": "system", "content": "s"}, user("a"), said("old"), user("b"), said("old")],
        "domain": "d",
    }
    dialogue = Dialogue.begin(0, line, chat=False)
    assert dialogue.messages == [{"role": "system", "content": "s"}, user("a")]
    assert dialogue.take(Answer("1", "stop"))
    assert dialogue.messages[1:] == [user("a"), said("1"), user("b")]
    assert not dialogue.take(Answer("2", "stop", reasoning="why"))
    assert dialogue.result() == {
        "domain": "d",
        "finish_reason": "stop",
        "messages": [*line["messages"][:2], said("1"), user("b"), {**said("2"), "reasoning_content": "why"}],
    }


def test_a_last_question_is_answered_and_a_cut_answer_ends_the_conversation() -> None:
    dialogue = Dialogue.begin(0, {"conversations": [{"from": "human", "value": "a"}]}, chat=False)
    assert not dialogue.take(Answer("1", "stop"))
    assert dialogue.result()["messages"] == [user("a"), said("1")]
    long = Dialogue.begin(0, {"messages": [user("a"), said("x"), user("b")]}, chat=False)
    assert not long.take(Answer("1", "length"))
    assert long.result()["messages"] == [user("a"), said("1")]


def test_calls_that_a_tool_answered_stay() -> None:
    tool = {"role": "tool", "content": "42"}
    dialogue = Dialogue.begin(0, {"messages": [user("a"), said("call"), tool, said("old")]}, chat=False)
    assert dialogue.messages == [user("a"), said("call"), tool]
    assert not dialogue.take(Answer("1", "stop"))
    assert dialogue.result()["messages"] == [user("a"), said("call"), tool, said("1")]


@given(
    turns=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=4), st.lists(st.integers(0, 9), max_size=4), st.booleans()
        ),
        min_size=1,
        max_size=4,
    )
)
def test_ids_are_kept_as_they_were_and_shared_where_the_prompt_goes_on(
    turns: list[tuple[list[int], list[int], bool]],
) -> None:
    """Each turn's prompt begins with all ids before it, or is a new text: then it is a document of its own."""
    dialogue = Dialogue.begin(0, {"messages": [m for _ in turns for m in (user("q"), said("a"))]}, chat=False)
    expected: list[tuple[list[int], list[int]]] = []
    for turn, (new, answer, goes_on) in enumerate(turns):
        before, mask = expected.pop() if expected and goes_on else ([], [])
        prompt = [*before, *new] if goes_on else [77 + turn, *new]
        if not goes_on:
            before, mask = [], []
        dialogue.take(Answer("t", "stop", prompt, answer))
        expected.append(([*prompt, *answer], [*mask, *[0] * (len(prompt) - len(mask)), *[1] * len(answer)]))
    found = dialogue.result()
    parts = found.get("documents", [found])
    assert [(p["input_ids"], p["loss_mask"]) for p in parts] == expected


@pytest.mark.parametrize("line", [{}, {"text": ""}, {"messages": [said("a")]}, {"input_ids": ["a"]}, {"messages": []}])
def test_lines_that_ask_nothing_are_malformed(line: dict[str, Any]) -> None:
    with pytest.raises(MalformedError):
        Dialogue.begin(0, line, chat=False)


# The file


@given(cut=st.integers(0, 400))
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("out") / "a.jsonl"
    names = [digest(b"%d" % n, {}) for n in range(4)]
    with AnswersFile(path, lambda n: names[n]) as answers:
        for n in (2, 0, 3, 1):
            answers.append(n, names[n], {"text": "é\ud800}\n" * n})
    raw = path.read_bytes()
    path.write_bytes(raw[: min(cut, len(raw))])
    whole = raw[:cut].count(b"\n")
    with AnswersFile(path, lambda n: names[n]) as answers:
        assert answers.done == set([2, 0, 3, 1][:whole])
        for n in set(range(4)) - answers.done:
            answers.append(n, names[n], {"text": ""})
    assert sorted(line["line"] for line in read(path)) == [0, 1, 2, 3]


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    foreign = write(tmp_path / "a.jsonl", [{"text": "mine"}])
    with pytest.raises(NextnError, match="not a file of answers"):
        AnswersFile(foreign, lambda n: None)
    assert foreign.read_text() == '{"text": "mine"}\n'
    path = tmp_path / "b.jsonl"
    name = digest(b"prompt", {"temperature": 0})
    with AnswersFile(path, lambda n: name) as held:
        held.append(0, name, {})
        with pytest.raises(NextnError, match="Another process"):
            AnswersFile(path, lambda n: name)
    for other in (digest(b"prompt", {"temperature": 1}), digest(b"other", {"temperature": 0}), None):
        with pytest.raises(NextnError, match="other prompts"):
            AnswersFile(path, lambda n, other=other: other)  # type: ignore[misc]


# A server


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_server() as server:
        yield server


def endpoint(stub: Stub, **options: Any) -> tuple[Endpoint, list[float]]:
    waits: list[float] = []
    return Endpoint(stub.url, sleep=waits.append, **options), waits


@pytest.mark.parametrize("ids", ["vllm", "sglang", None])
def test_conversations_by_a_server(stub: Stub, tmp_path: Path, ids: str | None) -> None:
    stub.ids = ids
    prompts = write(
        tmp_path / "p.jsonl",
        [
            {"messages": [user("a"), said("old"), user("b"), said("old")], "domain": "chat"},
            {"prompt": "go on"},
            {"messages": [user("too long")]},
            "nonsense",
        ],
    )
    out = tmp_path / "o.jsonl"
    run(["--endpoint", stub.url, "--prompts", str(prompts), "--out", str(out), "--temperature", "0.5"], code=1)
    by_line = {line["line"]: line for line in read(out)}
    assert set(by_line) == {0, 1}
    chat, text = by_line[0], by_line[1]
    assert chat["messages"] == [user("a"), said("echo: a"), user("b"), said("echo: b")]
    assert (chat["domain"], chat["finish_reason"]) == ("chat", "stop")
    assert text["text"] == "go onecho: go on"
    if ids is None:
        assert "input_ids" not in chat
        assert sum("return_token_ids" in body for body in stub.bodies) <= 4
    else:
        assert bytes(chat["input_ids"]).decode() == "aecho: abecho: b"
        assert chat["loss_mask"] == [0] + [1] * 7 + [0] + [1] * 7
        assert bytes(text["input_ids"]).decode() == text["text"]
        assert text["loss_mask"] == [0] * 5 + [1] * 11
    assert all(body["temperature"] == 0.5 and body["model"] == "stub" for body in stub.bodies)
    before = out.read_bytes()
    run(["--endpoint", stub.url, "--prompts", str(prompts), "--out", str(out), "--temperature", "0.5"], code=1)
    assert out.read_bytes() == before
    assert stub.asked == {"a": 1, "b": 1, "go on": 1}


def test_a_server_may_move_but_not_change_its_model(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = write(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "o.jsonl"
    run(["--endpoint", stub.url, "--prompts", str(prompts), "--out", str(out), "--limit", "1"])
    with stub_server() as moved:
        run(["--endpoint", moved.url, "--prompts", str(prompts), "--out", str(out)])
        assert moved.asked == {"b": 1}
        assert len(read(out)) == 2
        moved.models = ["another"]
        run(["--endpoint", moved.url, "--prompts", str(prompts), "--out", str(out)], code=2)
    assert "settings" in capsys.readouterr().err


def test_concurrency_is_used_and_bounded(stub: Stub, tmp_path: Path) -> None:
    stub.delay = 0.05
    prompts = write(tmp_path / "p.jsonl", [{"prompt": f"p{n}"} for n in range(24)])
    run(["--endpoint", stub.url, "--prompts", str(prompts), "--out", str(tmp_path / "o.jsonl"), "--concurrency", "6"])
    assert 3 <= stub.most <= 6
    assert sorted(line["line"] for line in read(tmp_path / "o.jsonl")) == list(range(24))


def test_failures_are_tried_again_with_longer_waits(stub: Stub) -> None:
    asker, waits = endpoint(stub, retries=5)
    stub.failures = [500, 0, 503, 429]
    assert asker.ask(Dialogue.begin(0, {"prompt": "x"}, chat=False), None).text == "echo: x"
    assert [0.25 <= waits[0] <= 0.5, 0.5 <= waits[1] <= 1, 1 <= waits[2] <= 2, waits[3] == 7] == [True] * 4
    stub.failures = [500] * 9
    with pytest.raises(NextnError, match=r"mood 500.*run again"):
        asker.ask(Dialogue.begin(0, {"prompt": "x"}, chat=False), None)
    assert len(stub.failures) == 3


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("told", "waited"),
    [
        ("61", (61, 61)),
        ("600", (600, 600)),
        ("in 90 seconds", (85, 90)),
        ("an hour ago", (0.25, 0.5)),
        ("soon", (0.25, 0.5)),
        ("-5", (0.25, 0.5)),
        ("nan", (0.25, 0.5)),
        ("1e400", (0.25, 0.5)),
        ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", (0.25, 0.5)),
    ],
)
def test_the_pause_that_a_server_asks_for_is_kept(
    stub: Stub, status: int, told: str, waited: tuple[float, float]
) -> None:
    later = {"in 90 seconds": 90, "an hour ago": -3600}
    stub.retry_after = {status: formatdate(time.time() + later[told], usegmt=True) if told in later else told}
    asker, waits = endpoint(stub)
    stub.failures = [status]
    assert asker.ask(Dialogue.begin(0, {"prompt": "x"}, chat=False), None).text == "echo: x"
    [wait] = waits
    assert waited[0] <= wait <= waited[1]


def test_a_server_that_asks_for_a_longer_pause_is_left_alone(stub: Stub) -> None:
    stub.retry_after = {429: "601"}
    asker, waits = endpoint(stub)
    stub.failures = [429]
    with pytest.raises(NextnError, match=r"429: mood 429, and asks to be left alone for 601 seconds"):
        asker.ask(Dialogue.begin(0, {"prompt": "x"}, chat=False), None)
    assert waits == []
    assert len(stub.bodies) == 1


def test_a_refused_prompt_is_not_a_refused_run(stub: Stub) -> None:
    asker, waits = endpoint(stub, api_key="k")
    with pytest.raises(RefusedError, match="context length exceeded"):
        asker.ask(Dialogue.begin(0, {"prompt": "too long"}, chat=False), None)
    with pytest.raises(RefusedError, match="without content"):
        asker.ask(Dialogue.begin(0, {"prompt": "silent"}, chat=True), None)
    stub.key = "other"
    with pytest.raises(NextnError, match="wrong key"):
        asker.ask(Dialogue.begin(0, {"prompt": "x"}, chat=False), None)
    assert waits == []
    stub.models = ["a", "b"]
    with pytest.raises(NextnError, match=r"2 models \(a, b\)"):
        Endpoint(stub.url)
    with pytest.raises(NextnError, match="no address"):
        Endpoint("localhost:8000")


def put(path: str, value: Any) -> Any:
    """Changes one place of a server's answer, named by its keys."""

    def change(told: dict[str, Any]) -> None:
        *way, last = ("choices", 0, *path.split(".")[1:]) if path.startswith("choice.") else path.split(".")
        at: Any = told
        for key in way:
            at = at[key]
        at[last] = value

    return change


def nested(levels: int) -> dict[str, Any]:
    """An object with so many lists, one in the other."""
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return {"arguments": value}


def within(seconds: float, work: Any) -> Any:
    """What `work` returns or raises; fails where it takes longer."""
    ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((work(), None))
        except BaseException as error:
            ended.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    found, error = ended.get(timeout=seconds)
    if error is not None:
        raise error
    return found


def test_a_programming_error_in_a_request_ends_the_run(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Endpoint, dialogue: Dialogue, seed: int | None) -> Answer:
        raise ZeroDivisionError(dialogue.number)

    monkeypatch.setattr(Endpoint, "ask", broken)
    asker, _ = endpoint(stub)
    dialogues = [Dialogue.begin(n, {"prompt": "x"}, chat=False) for n in range(5)]
    with pytest.raises(ZeroDivisionError):
        within(20, lambda: list(answer_remotely(asker, dialogues, at_once=2)))


@pytest.mark.parametrize("status", [200, 400])
def test_brackets_without_end_are_no_json(stub: Stub, status: int) -> None:
    asker, waits = endpoint(stub, retries=1)
    dialogue = Dialogue.begin(0, {"prompt": "x"}, chat=False)
    brackets = b"[" * 200_000
    stub.odd = lambda told: brackets
    if status == 200:
        with pytest.raises(NextnError, match=r"does not answer \(not JSON\)"):
            within(20, lambda: list(answer_remotely(asker, [dialogue], at_once=1)))
        assert len(waits) == 1
    else:
        stub.failures, stub.failure_body = [400, 400], brackets
        assert within(20, lambda: list(answer_remotely(asker, [dialogue], at_once=1))) == [
            (dialogue, "400: Bad Request")
        ]


@pytest.mark.parametrize(
    ("path", "value", "ids", "tokens"),
    [
        ("usage.completion_tokens", "many", True, 7),
        ("usage.completion_tokens", [1], True, 7),
        ("usage.completion_tokens", -3, True, 7),
        ("usage.completion_tokens", 10**400, True, 7),
        ("usage.completion_tokens", 10**30, True, 7),
        ("usage.completion_tokens", 10**9 + 1, True, 7),
        ("usage.completion_tokens", 10**9, True, 10**9),
        ("usage.completion_tokens", True, True, 7),
        ("usage", "none", True, 7),
        ("choice.token_ids", 5, False, 7),
        ("choice.token_ids", ["a", "b"], False, 7),
        ("choice.token_ids", [-1, 2.5, True], False, 7),
        ("prompt_token_ids", {"a": 1}, False, 7),
        ("prompt_token_ids", [1, None], False, 7),
        ("choice.message.content", [{"type": "text", "text": "echo"}, {"type": "text", "text": ": a"}], True, 7),
        ("choice.message.tool_calls", [], True, 7),
    ],
)
def test_what_is_odd_beside_an_answer_does_not_lose_its_text(
    stub: Stub, tmp_path: Path, path: str, value: Any, ids: bool, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.odd = put(path, value)
    prompts, out = write(tmp_path / "p.jsonl", [{"messages": [user("a")]}]), tmp_path / "o.jsonl"
    words = ["--endpoint", stub.url, "--prompts", str(prompts), "--out", str(out), "--json"]
    within(60, lambda: run(words))
    assert json.loads(capsys.readouterr().out)["tokens"] == tokens
    [line] = read(out)
    assert line["messages"] == [user("a"), said("echo: a")]
    assert line.get("input_ids") == ([ord(c) for c in "aecho: a"] if ids else None)
    assert ("loss_mask" in line) == ids


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("choices", 5, "without choices"),
        ("choice.message", "x", "without a message"),
        ("choice.message.content", 5, "content is not text"),
        ("choice.message.content", {"type": "text", "text": "x"}, "content is not text"),
        ("choice.message.content", ["x"], "content is not text"),
        ("choice.message.content", [{"type": "text", "text": 5}], "content is not text"),
        ("choice.message.content", [{"type": "text", "text": "x"}, {"type": "image_url"}], "content is not text"),
        ("choice.message.tool_calls", "x", "tool_calls are no list of objects"),
        ("choice.message.tool_calls", ["x"], "tool_calls are no list of objects"),
        ("choice.message.tool_calls", [nested(99)], "tool_calls are nested more than 100 levels deep"),
        ("choice.message.tool_calls", [nested(800)], "tool_calls are nested more than 100 levels deep"),
        ("choice.message.reasoning_content", ["x"], "reasoning is not text"),
        ("choice.text", None, "without text"),
        ("choice.text", 5, "without text"),
    ],
)
def test_an_answer_that_is_none_is_refused_and_asked_again(
    stub: Stub, tmp_path: Path, path: str, value: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = {"prompt": "a"} if path == "choice.text" else {"messages": [user("a")]}
    prompts, out = write(tmp_path / "p.jsonl", [prompt]), tmp_path / "o.jsonl"
    words = ["--endpoint", stub.url, "--prompts", str(prompts), "--out", str(out)]
    stub.odd = put(path, value)
    within(60, lambda: run(words, code=1))
    assert why in capsys.readouterr().err
    assert not out.exists()
    stub.odd = None
    run(words)
    assert [line["line"] for line in read(out)] == [0]


def test_tool_calls_of_a_hundred_levels_are_kept(stub: Stub) -> None:
    calls = [nested(98)]
    stub.odd = put("choice.message.tool_calls", calls)
    asker, _ = endpoint(stub)
    assert asker.ask(Dialogue.begin(0, {"messages": [user("a")]}, chat=False), None).tool_calls == calls


def test_an_answer_too_deep_to_parse_is_refused_alone(stub: Stub) -> None:
    stub.odd = lambda told: b"[" * 200_000 + b"]" * 200_000 if "deep" in str(told) else None
    asker, waits = endpoint(stub)
    dialogues = [Dialogue.begin(n, {"prompt": p}, chat=False) for n, p in enumerate(["deep", "x"])]
    told = within(20, lambda: {d.number: why for d, why in answer_remotely(asker, dialogues, at_once=1)})
    assert told == {0: "an answer that is nested too deeply", 1: None}
    assert waits == []


@contextmanager
def raw_server(first: bytes, drip: bytes = b"") -> Iterator[str]:
    """Sends `first` to every connection, then `drip` every 0.05 s; else closes it."""
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(first)
            while drip and not ended.wait(0.05):
                connection.sendall(drip)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "first",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 503 Busy\r\n\r\n",
        b"",
    ],
)
def test_an_attempt_ends_in_time_however_slowly_it_is_answered(first: bytes) -> None:
    waits: list[float] = []
    with raw_server(first, b" ") as url, pytest.raises(NextnError, match=r"timed out|503: Busy"):
        within(10, lambda: Endpoint(url, retries=1, timeout_seconds=0.4, sleep=waits.append))
    assert len(waits) == 1


@pytest.mark.parametrize("length", ["", "Content-Length: 9999999\r\n", "Transfer-Encoding: chunked\r\n"])
def test_an_answer_without_end_is_refused(length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextn.train.endpoint.LARGEST_BODY_BYTES", 2**20)
    piece = b"[" * 2**19
    if "chunked" in length:
        piece = b"%x\r\n%b\r\n" % (len(piece), piece)
    with raw_server(f"HTTP/1.1 200 OK\r\n{length}\r\n".encode(), piece) as url:
        asker = Endpoint(url, model="m", sleep=pytest.fail)
        with pytest.raises(RefusedError, match="an answer of more than 1 MiB"):
            within(20, lambda: asker.ask(Dialogue.begin(0, {"prompt": "x"}, chat=False), None))


def test_an_answer_that_is_cut_is_tried_again() -> None:
    waits: list[float] = []
    cut = b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"data": []}'
    with raw_server(cut) as url, pytest.raises(NextnError, match="IncompleteRead"):
        within(10, lambda: Endpoint(url, retries=1, sleep=waits.append))
    assert len(waits) == 1


@pytest.mark.parametrize("odd", ["", " ", "a\nb", "a\x1b[2Jb", "\ud800", 5, None, ["x"]])
def test_a_model_without_a_printable_name_is_none(stub: Stub, odd: Any) -> None:
    stub.models = ["good", odd]
    assert Endpoint(stub.url).model == "good"
    stub.models = [odd, odd]
    with pytest.raises(NextnError, match="lists 2 models, none with a name of printable text"):
        Endpoint(stub.url)


@pytest.mark.parametrize("status", [400, 404, 503])
def test_a_servers_words_are_one_harmless_line(stub: Stub, status: int) -> None:
    asker, _ = endpoint(stub, retries=0)
    stub.failures = [status] * 2
    stub.failure_body = json.dumps({"error": {"message": "bad\n\x1b[31mred\x07 \ud800\u202eend."}}).encode()
    with pytest.raises((RefusedError, NextnError)) as caught:
        asker.ask(Dialogue.begin(0, {"prompt": "x"}, chat=False), None)
    assert f"{status}: bad ?[31mred? ??end" in str(caught.value)


@pytest.mark.parametrize("first", [b"HTTP/1.1 503 \x1b[31m\x07\r\n\r\n", b"\x1b[31mno\x07 HTTP\r\n\r\n"])
def test_a_status_line_is_harmless(first: bytes) -> None:
    with raw_server(first) as url, pytest.raises(NextnError) as caught:
        Endpoint(url, retries=0)
    assert "\x1b" not in str(caught.value)
    assert "\x07" not in str(caught.value)


def test_a_key_is_sent_without_white_space_around_it(stub: Stub) -> None:
    stub.key = "secret"
    asker, _ = endpoint(stub, api_key=" secret\n")
    assert asker.ask(Dialogue.begin(0, {"prompt": "x"}, chat=False), None).text == "echo: x"


@pytest.mark.parametrize("key", ["se\ncret", "se\x00cret", "s\u20accret"])
def test_a_key_that_no_header_carries_is_refused_at_once(stub: Stub, key: str) -> None:
    with pytest.raises(NextnError, match="OPENAI_API_KEY"):
        Endpoint(stub.url, api_key=key, sleep=pytest.fail)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://127.0.0.1:abc", "port"),
        ("http://127.0.0.1:70000/v1", "port"),
        ("http://127.0.0.1:0", "port"),
        ("http://[::1", "no address"),
        ("http://:8000", "no address"),
        ("http://user:word@127.0.0.1:8000", "no address"),
        ("http://127.0.0.1:8000/a b", "no address"),
        ("http://127.0.0.1:8000/\u20ac", "no address"),
        ("http://a..b", "no address"),
        (f"http://{'x' * 70}.com", "no address"),
        ("http://\uff05.com", "no address"),
        ("http://a%20b", "no address"),
        ("http://127.0.0.1:8000/v1?api-version=2", "a query or a fragment"),
        ("http://127.0.0.1:8000?", "a query or a fragment"),
        ("http://127.0.0.1:8000/v1#top", "a query or a fragment"),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(url: str, what: str) -> None:
    with pytest.raises(NextnError, match=what):
        Endpoint(url, model="m", sleep=pytest.fail)


def test_a_seed_gives_every_answer_its_own(stub: Stub, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", [{"messages": [user("a"), said("x"), user("b")]}, {"prompt": "c"}])
    for name in ("1", "2"):
        run(["--endpoint", stub.url, "--prompts", str(prompts), "--out", str(tmp_path / name), "--seed", "5"])
    seeds = sorted(body["seed"] for body in stub.bodies)
    assert len(set(seeds)) == 3
    assert seeds[::2] == seeds[1::2]


def test_killed_in_the_middle_every_prompt_is_answered_once(stub: Stub, tmp_path: Path) -> None:
    stub.delay = 0.05
    prompts = write(tmp_path / "p.jsonl", [{"prompt": f"p{n}"} for n in range(30)])
    out = tmp_path / "o.jsonl"
    words = ["regenerate", "--endpoint", stub.url, "--prompts", str(prompts), "--out", str(out), "--concurrency", "3"]
    process = subprocess.Popen([sys.executable, "-m", "nextn.cli", *words], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while (not out.is_file() or out.read_bytes().count(b"\n") < 5) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    survived = read(out)
    assert 5 <= len(survived) < 30
    stub.delay = 0
    run(words[1:])
    assert read(out)[: len(survived)] == survived
    assert sorted(line["line"] for line in read(out)) == list(range(30))
    assert max(stub.asked[f"p{line['line']}"] for line in survived) == 1


def test_ctrl_c_between_a_write_and_its_note_counts_the_answer(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = write(tmp_path / "p.jsonl", [{"prompt": f"p{n}"} for n in range(3)]), tmp_path / "o.jsonl"
    real = os.write

    def interrupted(file: int, raw: bytes) -> int:
        written = real(file, raw)
        if raw.startswith(b'{"line"'):
            raise KeyboardInterrupt
        return written

    monkeypatch.setattr(os, "write", interrupted)
    run(["--endpoint", stub.url, "--prompts", str(prompts), "--out", str(out)], 130)
    assert "stopped with 1 of 3 prompts answered" in capsys.readouterr().err
    assert len(read(out)) == 1


def test_ctrl_c_says_how_to_go_on(stub: Stub, tmp_path: Path) -> None:
    stub.delay = 0.05
    prompts, out = write(tmp_path / "p.jsonl", [{"prompt": f"p{n}"} for n in range(400)]), tmp_path / "o.jsonl"
    words = ["regenerate", "--endpoint", stub.url, "--prompts", str(prompts), "--out", str(out), "--concurrency", "3"]
    process = subprocess.Popen([sys.executable, "-m", "nextn.cli", *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while (not out.is_file() or not out.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == f"stopped with {len(read(out))} of 400 prompts answered; the same command goes on from there\n"


# The local engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3_5", vocab_size=420)
    return write_folder(made, byte_level(), {"eos_token": "<|end|>"}, PLAIN)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder)


def test_the_local_engine_answers_what_generate_answers(folder: Path, model: Model, tmp_path: Path) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    prompts = write(
        tmp_path / "p.jsonl",
        [
            {"messages": [user("Why?"), said("old"), user("And?"), said("old")]},
            {"text": "def accept("},
            {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "domain": "ids"},
            {"input_ids": [5] * 600},
            {"input_ids": [420]},
        ],
    )
    out = tmp_path / "o.jsonl"
    words = [str(folder), "--prompts", str(prompts), "--out", str(out), "--max-tokens", "6", "--temperature", "0"]
    run([*words, "--batch", "2"], code=1)
    lines = {line["line"]: line for line in read(out)}
    assert set(lines) == {0, 1, 2}

    def answer(ids: list[int]) -> list[int]:
        return generate(model, ids, max_tokens=6, temperature=0.0).tokens

    first = tokenizer.encode_chat([user("Why?")])
    one = answer(first)
    # A greedy answer of a random model does not end: it is cut at its length, and so is the conversation.
    assert lines[0]["finish_reason"] == "length"
    assert lines[0]["messages"] == [user("Why?"), said(tokenizer.decode(one))]
    assert (lines[0]["input_ids"], lines[0]["loss_mask"]) == (first + one, [0] * len(first) + [1] * 6)
    text = tokenizer.encode("def accept(")
    assert lines[1]["input_ids"] == text + answer(text)
    assert lines[1]["text"] == "def accept(" + tokenizer.decode(answer(text))
    assert lines[2]["input_ids"] == [5, 6, *answer([5, 6])]
    assert (lines[2]["loss_mask"], lines[2]["domain"]) == ([0, 0] + [1] * 6, "ids")
    reader = LineReader(tokenizer, vocab=420, max_length=64)
    for raw in out.read_bytes().splitlines():
        [document] = reader.read(raw, DataReport())
        assert list(document.ids) == json.loads(raw)["input_ids"]


def test_later_turns_see_the_answers_before_them(model: Model) -> None:
    """With the third token of the first answer as the end token, the conversation goes on after it."""
    assert model.tokenizer is not None
    ids = model.tokenizer.encode_chat([user("Why?")])
    end = generate(model, ids, max_tokens=3, temperature=0.0).tokens[-1]
    short = replace(model, defaults=replace(model.defaults, eos_ids=(end,)))
    options = {"max_tokens": 9, "temperature": 0.0}
    lines = [{"messages": [user("Why?"), said("x"), user("And?"), said("x")]}, {"messages": [user("Who?")]}]
    dialogues = [Dialogue.begin(n, line, chat=False) for n, line in enumerate(lines)]
    over = list(answer_locally(short, dialogues, at_once=2, options=options))
    assert {d.number: problem for d, problem in over} == {0: None, 1: None}
    one = generate(short, ids, **options)
    assert len(one.tokens) == 3
    assert one.text
    second = model.tokenizer.encode_chat([user("Why?"), said(one.text), user("And?")])
    two = generate(short, second, **options)
    found = dialogues[0].result()
    assert found["messages"][1::2] == [said(one.text), said(two.text or "")]
    assert found["documents"] == [
        {"input_ids": ids + one.tokens, "loss_mask": [0] * len(ids) + [1] * 3},
        {"input_ids": second + two.tokens, "loss_mask": [0] * len(second) + [1] * len(two.tokens)},
    ]


@pytest.mark.parametrize(("at_once", "temperature"), [(1, 0.0), (3, 0.0), (3, 0.9), (50, 0.0)])
def test_places_are_filled_again_whatever_the_lengths(model: Model, at_once: int, temperature: float) -> None:
    """Each turn is what `generate` says alone, also where later turns outgrow the pool that the first were given."""
    assert model.tokenizer is not None
    ids = model.tokenizer.encode_chat([user("Why?")])
    end = generate(model, ids, max_tokens=3, temperature=0.0).tokens[-1]
    short = replace(model, defaults=replace(model.defaults, eos_ids=(end,)))
    turns = [user("Why?"), said("x"), user("And? " * 40), said("x"), user("So? " * 60)]
    lines = [{"messages": turns if n % 4 == 0 else [user("x" * (7 * n % 30 + 1))]} for n in range(22)]
    dialogues = [Dialogue.begin(n, line, chat=False) for n, line in enumerate(lines)]
    options = {"max_tokens": 12, "temperature": temperature}
    over = list(answer_locally(short, iter(dialogues), at_once=at_once, options=options, seed=5))
    assert sorted(d.number for d, problem in over if problem is None) == list(range(22))
    answered = 0
    for dialogue in dialogues:
        for turn, answer in enumerate(dialogue._answers):
            seed = seed_of(5, replace(dialogue, _answers=dialogue._answers[:turn]))
            alone = generate(short, list(answer.prompt_ids or ()), **options, seed=seed)
            assert list(answer.token_ids or ()) == alone.tokens
            assert (answer.text, answer.finish_reason) == (alone.text, alone.finish_reason)
            answered += 1
    assert temperature or answered > 22


def test_an_answer_that_breaks_is_refused_and_the_others_go_on(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"input_ids": ids} for ids in ([5, 6, 7], [5, 200, 7], [9, 10])]
    plain = model.target.embed.forward
    monkeypatch.setattr(
        model.target.embed, "forward", lambda ids: plain(ids).masked_fill((ids == 200)[..., None], torch.nan)
    )
    dialogues = [Dialogue.begin(n, line, chat=False) for n, line in enumerate(lines)]
    told = {d.number: why for d, why in answer_locally(model, dialogues, at_once=3, options={"max_tokens": 4})}
    assert told == {0: None, 1: "The model's logits hold NaN or are infinite", 2: None}


def test_thinking_that_the_template_opened_is_part_of_the_answer(folder: Path, tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    opened.mkdir()
    for file in folder.iterdir():
        (opened / file.name).symlink_to(file)
    (opened / "chat_template.jinja").unlink()
    (opened / "chat_template.jinja").write_text(OPENED)
    prompts = write(tmp_path / "p.jsonl", [{"text": "Why?"}])
    out = tmp_path / "o.jsonl"
    run([str(opened), "--prompts", str(prompts), "--out", str(out), "--max-tokens", "4", "--chat"])
    [line] = read(out)
    assert line["messages"][1]["content"].startswith("<think>\n")
    assert sum(line["loss_mask"]) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "No prompts"),
        (["m", "--endpoint", "http://x", "--prompts", "p", "--out", "o"], "Both a model"),
        (["--prompts", "p", "--out", "o", "--batch", "0"], "--batch is 0"),
        (["--prompts", "absent", "--out", "o"], "no data file"),
    ],
)
def test_bad_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(words, code=2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "fix"),
    [
        ("--retries", "-1", "a whole number of 0 or more"),
        ("--timeout", "0", "over 0, up to 86400"),
        ("--timeout", "-1", "over 0, up to 86400"),
        ("--timeout", "nan", "over 0, up to 86400"),
        ("--timeout", "1e30", "over 0, up to 86400"),
        ("--concurrency", "0", "a whole number from 1 to 4096"),
        ("--concurrency", "1000000", "a whole number from 1 to 4096"),
        ("--batch", "0", "a whole number of 1 or more"),
        ("--limit", "0", "a whole number of 1 or more"),
        ("--draft-tokens", "9", "a whole number from 0 to 8"),
        ("--max-tokens", "0", "a whole number of 1 or more"),
        ("--temperature", "-0.5", "a number of 0 or more"),
        ("--temperature", "nan", "a number of 0 or more"),
        ("--top-p", "0", "a number over 0, up to 1"),
        ("--top-k", "-2", "a whole number of -1 or more"),
        ("--min-p", "2", "a number of 0 or more, up to 1"),
        ("--seed", str(2**63), "a whole number from"),
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_is_read_or_asked(
    option: str, value: str, fix: str, stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = write(tmp_path / "p.jsonl", [{"prompt": "a"}]), tmp_path / "o.jsonl"
    run(["--endpoint", stub.url, "--prompts", str(prompts), "--out", str(out), option, value], code=2)
    what, how = capsys.readouterr().err.splitlines()
    assert option.lstrip("-").replace("-", "_") in what.replace("-", "_")
    assert fix in how
    assert not stub.bodies
    assert not out.exists()


def test_the_ends_of_the_ranges_are_taken(stub: Stub, tmp_path: Path) -> None:
    """As many requests at a time as may be asked for, no second attempt, and a batch beyond what a counter holds."""
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    words = ["--prompts", str(prompts), "--max-tokens", "2"]
    wide = ["--endpoint", stub.url, "--concurrency", "4096", "--retries", "0", "--timeout", "86400"]
    run([*words, "--out", str(tmp_path / "served"), *wide])
    run([*words, "--out", str(tmp_path / "own"), "--batch", str(10**30)])
    assert len(read(tmp_path / "served")) == len(read(tmp_path / "own")) == 2


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["no-such-model"], 2),
        (["--device", "no-such-device"], 2),
        (["--head", "absent"], 2),
        (["--endpoint", "STUB"], 2),
        (["--limit", "1"], 1),
    ],
)
def test_a_run_without_an_answer_leaves_no_file(
    words: list[str], code: int, stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it touch one that was there."""
    stub.key = "another"
    prompts = write(tmp_path / "p.jsonl", ["nonsense", {"prompt": "a"}])
    words = [stub.url if word == "STUB" else word for word in words]
    made, there = tmp_path / "made.jsonl", tmp_path / "there.jsonl"
    there.touch()
    for out in (made, there):
        run([*words, "--prompts", str(prompts), "--out", str(out)], code=code)
        assert "made.jsonl" not in capsys.readouterr().out
    assert not made.exists()
    assert there.read_bytes() == b""


def test_a_file_that_another_process_takes_away_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and holding it, a run that had no answer may have removed it."""
    path = tmp_path / "a.jsonl"
    held = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda file, how: (path.unlink(), held(file, how)))
    with pytest.raises(NextnError, match="Another process"):
        AnswersFile(path, lambda n: None)


def test_a_file_without_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    run(["--prompts", str(tmp_path / "empty.jsonl"), "--out", str(tmp_path / "o")], code=2)
    assert "holds no prompt" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
