"""Tokenizers from checkpoint folders: transformers is the oracle for ids, text and chats."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from nextn.engine.text import Tokenizer, load_tokenizer
from nextn.errors import NextnError
from tests.engine.tokenizers_made import byte_fallback, byte_level, write_folder

CONFIG = {
    "eos_token": "<|end|>",
    "pad_token": {"__type": "AddedToken", "content": "<|end|>", "special": True},
    "tokenizer_class": "PreTrainedTokenizerFast",
}
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Grüße <|end|> 🎉"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("checkpoint"), byte_level(), CONFIG)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@given(text=st.text(max_size=40), special=st.booleans())
def test_ids_and_text_equal_transformers(
    tokenizer: Tokenizer, theirs: PreTrainedTokenizerFast, text: str, special: bool
) -> None:
    text = f"{text}<|start|>{text}"
    ids = tokenizer.encode(text, special=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("options", [{}, {"generation_prompt": False}, {"variables": {"thinking": True}}])
def test_chats_equal_transformers(tokenizer: Tokenizer, theirs: PreTrainedTokenizerFast, options: dict) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    prompt = options.get("generation_prompt", True)
    for given_tools in (None, tools):
        ids = tokenizer.encode_chat(CHAT, tools=given_tools, **options)
        expected = theirs.apply_chat_template(
            CHAT, tools=given_tools, add_generation_prompt=prompt, return_dict=False, **options.get("variables", {})
        )
        assert ids == expected
    assert tokenizer.render_chat(CHAT, **options).startswith("<|start|>system\nBe short.<|end|>\n<|start|>user\n")
    assert ("assistant" in tokenizer.render_chat(CHAT, **options)) is prompt


def test_a_template_inside_tokenizer_config(tmp_path: Path) -> None:
    config = CONFIG | {"chat_template": "{{ messages[0].content }}!"}
    made = Tokenizer(write_folder(tmp_path, byte_level(), config, chat_template=None))
    assert made.render_chat(CHAT) == "Be short.!"


def test_a_chat_gets_no_second_begin_token(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    made = Tokenizer(write_folder(tmp_path, byte_fallback(), config, template))
    ids = made.encode_chat([{"role": "user", "content": "The head"}])
    assert [id for id in ids if id in (1, 2)] == [ids[0], ids[-1]] == [1, 2]
    assert made.encode("The head")[0] == 1


def test_a_chat_that_the_template_refuses(tokenizer: Tokenizer) -> None:
    with pytest.raises(NextnError, match="refuses the messages: Unexpected role robot"):
        tokenizer.encode_chat([{"role": "robot", "content": "x"}])


def test_no_template(tmp_path: Path) -> None:
    made = Tokenizer(write_folder(tmp_path, byte_level(), CONFIG, chat_template=None))
    with pytest.raises(NextnError, match="no chat template"):
        made.encode_chat(CHAT)


def test_special_tokens_by_role(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_token("eos_token") == tokenizer.special_token("pad_token") == "<|end|>"
    assert tokenizer.special_token("bos_token") is None
    assert tokenizer.eos_ids == (tokenizer.token_to_id("<|end|>"),)
    assert tokenizer.token_to_id("no such token") is None


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("ab"), 10**6]) == "ab"


def test_limits_left_in_the_file_are_ignored(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=50)
    assert Tokenizer(write_folder(tmp_path, made, CONFIG)).encode("abcdefgh") == byte_level().encode("abcdefgh").ids


@pytest.mark.parametrize("flag", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("in_file", [True, False])
def test_a_begin_token_is_added_where_transformers_adds_it(tmp_path: Path, flag: dict, in_file: bool) -> None:
    codec = byte_fallback()
    if not in_file:
        codec.post_processor = processors.Sequence([])
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **flag}
    made = Tokenizer(write_folder(tmp_path, codec, config))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for special in (True, False):
        assert made.encode("The head", special=special) == theirs.encode("The head", add_special_tokens=special)
    assert made.encode("The head", special=False)[0] != 1


def test_tokens_that_only_tokenizer_config_knows(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    config = CONFIG | {"added_tokens_decoder": {str(size): {"content": "<think>", "special": False}}}
    made = Tokenizer(write_folder(tmp_path, byte_level(), config))
    assert made.encode("a<think>b")[1] == size
    assert made.token_to_id("<think>") == size
    assert made.decode([*made.encode("a<think>b"), 10**6]) == "a<think>b"


def test_loading_and_decoding_need_no_transformers(folder: Path) -> None:
    code = (
        "import sys, pathlib\nfrom nextn.engine.text import load_tokenizer\n"
        "t = load_tokenizer(pathlib.Path(sys.argv[1]))\nassert t.decode(t.encode('abc')) == 'abc' and t.eos_ids\n"
        "sys.exit(any(m in sys.modules for m in ('transformers', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)]).returncode == 0


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_vocabulary_files_without_tokenizer_json(tmp_path: Path) -> None:
    made = byte_level()
    made.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "unk_token": "<|end|>"})
    )
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.decode(loaded.encode("The head é 🎉")) == "The head é 🎉"
    assert loaded.eos_ids == (made.token_to_id("<|end|>"),)


@pytest.mark.parametrize("content", ["", "{", '{"model": {"type": "Nonsense"}}', "[]"])
def test_a_broken_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(NextnError) as error:
        load_tokenizer(tmp_path)
    assert "tokenizer.json cannot be read" in error.value.what


def test_a_tokenizer_that_needs_its_own_code(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"})
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    with pytest.raises(NextnError, match="cannot be loaded"):
        loaded.encode("x")
    assert not (tmp_path / "ran").exists()


def test_text_that_is_not_unicode(tokenizer: Tokenizer) -> None:
    with pytest.raises(NextnError, match="not valid Unicode at character 2"):
        tokenizer.encode("ab\udcff")
