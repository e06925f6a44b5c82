"""Exactly what the model would have written is predicted, whatever the template does to earlier turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.engine.text import Tokenizer
from nextn.errors import NextnError
from nextn.train.masks import Chat, chat_documents
from tests.train.chats import BLOCKS, DROPPED, LAST_USER, OPENED, PLAIN, THINKING, chat_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    @cache
    def make(template: str) -> Tokenizer:
        return chat_tokenizer(Path(tmp_path_factory.mktemp("chat")), template)

    return make


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn."""
    start = [{"role": "system", "content": system}] if system else []
    return start + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def predicted(tokenizer: Tokenizer, chat: Chat) -> list[list[tuple[str, str]]]:
    """A document's runs: what stands before, what is predicted. Together they are its text."""
    out = []
    for ids, mask in chat.documents:
        runs = [
            (flag, tokenizer.decode([i for i, _ in run], skip_special=False))
            for flag, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
        ]
        if not runs[-1][0]:
            runs = runs[:-1]
        assert [flag for flag, _ in runs] == [False, True] * (len(runs) // 2)
        out.append([(runs[i][1], runs[i + 1][1]) for i in range(0, len(runs), 2)])
    return out


def run(tokenizer: Tokenizer, messages: list[dict[str, str]], **options: Any) -> Chat:
    return chat_documents(tokenizer, messages, eos_ids=tokenizer.eos_ids, **options)


words = st.text(alphabet="abc dé日\n</>{}", min_size=1, max_size=12).filter(lambda t: "</think>" not in t)
conversations = st.lists(words, min_size=2, max_size=8).map(lambda w: turns(*w))


@settings(max_examples=40)
@given(messages=conversations, template=st.sampled_from((PLAIN, BLOCKS)))
def test_a_template_that_rewrites_nothing_gives_one_document(
    made: Callable[[str], Tokenizer], messages: list[dict[str, str]], template: str
) -> None:
    tokenizer = made(template)
    expected, before = [], ""
    for m in messages:
        if m["role"] == "assistant":
            expected.append((f"{before}<|start|>assistant\n", m["content"] + "<|end|>"))
            before = "\n"
        else:
            before += f"<|start|>user\n{m['content']}<|end|>\n"
    chat = run(tokenizer, messages)
    assert chat.unlocated == 0
    # A token that begins before the answer is the prompt's: the answer's first line breaks may merge into it.
    [document] = predicted(tokenizer, chat)
    for (_, said), (_, wanted) in zip(document, expected, strict=True):
        assert wanted.endswith(said)
        assert wanted[: len(wanted) - len(said)].strip("\n") == ""
    assert "".join(a + b for a, b in document) == "".join(a + b for a, b in expected)


def test_generation_blocks_decide_where_a_template_has_them(made: Callable[[str], Tokenizer]) -> None:
    """The block may begin after a part of the turn that is no generation prompt."""
    inner = BLOCKS.replace("{% generation %}{{ m.content }}", "Answer:{% generation %}{{ m.content }}")
    document = predicted(made(inner), run(made(inner), turns("u", "one", "v", "two")))
    assert document == [
        [
            ("<|start|>user\nu<|end|>\n<|start|>assistant\nAnswer:", "one<|end|>"),
            ("\n<|start|>user\nv<|end|>\n<|start|>assistant\nAnswer:", "two<|end|>"),
        ]
    ]


@settings(max_examples=30)
@given(messages=st.lists(words, min_size=2, max_size=6).map(lambda w: turns(*w)))
def test_each_thinking_answer_is_learnt_as_it_was_written(
    made: Callable[[str], Tokenizer], messages: list[dict[str, str]]
) -> None:
    """Earlier thinking is context no more; every answer is predicted once, with its own thinking."""
    tokenizer = made(THINKING)
    for number, m in enumerate(messages):
        if m["role"] == "assistant":
            m["content"] = f"<think>\nidea {number}\n</think>\n\nsay {m['content'].strip()}"
    count = sum(m["role"] == "assistant" for m in messages)
    documents = predicted(tokenizer, run(tokenizer, messages))
    assert len(documents) == count
    history = ""
    answers = iter(documents)
    for number, m in enumerate(messages):
        if m["role"] == "user":
            history += f"<|start|>user\n{m['content']}<|end|>\n<|start|>assistant\n"
            continue
        said = m["content"].split("</think>\n\n")[1]
        assert next(answers) == [(history, f"<think>\nidea {number}\n</think>\n\n{said}<|end|>")]
        history += f"{said}<|end|>\n"


def test_thinking_that_the_prompt_opens_or_closes_is_not_predicted(made: Callable[[str], Tokenizer]) -> None:
    messages = turns("u", "<think>\nidea\n</think>\n\nsay")
    opened = predicted(made(OPENED), run(made(OPENED), messages))
    assert opened == [[("<|start|>user\nu<|end|>\n<|start|>assistant\n<think>\n", "idea\n</think>\n\nsay<|end|>")]]
    off = run(made(THINKING), turns("u", "say"), variables={"enable_thinking": False})
    assert predicted(made(THINKING), off) == [
        [("<|start|>user\nu<|end|>\n<|start|>assistant\n<think>\n\n</think>\n\n", "say<|end|>")]
    ]


def test_tool_rounds_stay_in_one_document(made: Callable[[str], Tokenizer]) -> None:
    """Answers after the last question keep their thinking, so they share the document."""
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "<think>\na\n</think>\n\ncall"},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "<think>\nb\n</think>\n\nsay"},
    ]
    assert predicted(made(THINKING), run(made(THINKING), messages)) == [
        [
            ("<|start|>user\nu<|end|>\n<|start|>assistant\n", "<think>\na\n</think>\n\ncall<|end|>"),
            ("\n<|start|>tool\nt<|end|>\n<|start|>assistant\n", "<think>\nb\n</think>\n\nsay<|end|>"),
        ]
    ]


def test_thinking_that_the_template_always_drops_is_counted(made: Callable[[str], Tokenizer]) -> None:
    tokenizer = made(DROPPED)
    chat = run(tokenizer, turns("u", "<think>\nlong idea\n</think>Ja", "v", "A plain one"))
    assert chat.thinking_dropped == 1
    assert chat.unlocated == 0
    assert predicted(tokenizer, chat) == [
        [
            ("<|start|>user\nu<|start|>assistant\n", "Ja<|end|>"),
            ("<|start|>user\nv<|start|>assistant\n", "A plain one<|end|>"),
        ]
    ]


def test_no_generation_prompt_and_tools_that_move(made: Callable[[str], Tokenizer]) -> None:
    """The header is what stays when the answer changes; a moved tool list makes a document of its own."""
    tokenizer = made(LAST_USER)
    plain = run(tokenizer, turns("u", "one", "v", "two"))
    assert predicted(tokenizer, plain) == [[("[INST]u[/INST]", " one<|end|>"), ("[INST]v[/INST]", " two<|end|>")]]
    moved = run(tokenizer, turns("u", "one", "v", "two"), tools=[{"name": "f"}])
    told = '[{"name": "f"}]'
    assert predicted(tokenizer, moved) == [
        [(f"[INST]{told}u[/INST]", " one<|end|>")],
        [(f"[INST]u[/INST] one<|end|>[INST]{told}v[/INST]", " two<|end|>")],
    ]


def test_an_answer_to_nothing_is_not_predicted(made: Callable[[str], Tokenizer]) -> None:
    messages = [{"role": "assistant", "content": "hello"}, *turns("u", "one")]
    chat = run(made(PLAIN), messages)
    assert chat.unlocated == 1
    assert predicted(made(PLAIN), chat) == [
        [("<|start|>assistant\nhello<|end|>\n<|start|>user\nu<|end|>\n<|start|>assistant\n", "one<|end|>")]
    ]


def test_no_assistant_no_document_and_a_refusal_is_an_error(made: Callable[[str], Tokenizer]) -> None:
    assert run(made(PLAIN), turns("u")).documents == []
    strict = "{% for m in messages %}{{ raise_exception('no systems') if m.role == 'system' }}{% endfor %}"
    with pytest.raises(NextnError, match="no systems"):
        run(made(strict), turns("u", "a", system="s"))


@settings(max_examples=30)
@given(messages=conversations, template=st.sampled_from((PLAIN, BLOCKS, THINKING, OPENED, DROPPED, LAST_USER)))
def test_every_answer_is_predicted_exactly_once(
    made: Callable[[str], Tokenizer], messages: list[dict[str, str]], template: str
) -> None:
    tokenizer = made(template)
    tagged = [
        {**m, "content": f"<{n}>{m['content']}"} if m["role"] == "assistant" else m for n, m in enumerate(messages)
    ]
    documents = predicted(tokenizer, run(tokenizer, tagged))
    said = [text for document in documents for _, text in document]
    assert len(said) == sum(m["role"] == "assistant" for m in messages)
    for text, n in zip(said, [n for n, m in enumerate(tagged) if m["role"] == "assistant"], strict=True):
        assert text.count(f"<{n}>") == 1
        assert text.endswith("<|end|>")
