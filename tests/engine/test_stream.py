"""Incremental text: pieces make up the decoded whole, and stop strings cut where one token a step would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nextn.engine.stream import REPLACEMENT, Detokenizer, TextStream
from nextn.engine.text import Tokenizer
from nextn.errors import NextnError
from tests.engine.tokenizers_made import byte_fallback, byte_level, write_folder

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
SIZE = BYTE_LEVEL.get_vocab_size()

texts = st.text(max_size=30)
ids_lists = st.lists(st.integers(0, SIZE - 1), max_size=30)


CHUNKY = byte_level(["ab aab\nbb é ba", "aaab bab é\n\nab é", "a ba b\né abé"] * 3)
"""Tokens of several characters of the alphabet below, so that one token can complete several stop strings."""


@pytest.fixture(scope="module")
def chunky(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_folder(tmp_path_factory.mktemp("chunky"), CHUNKY))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_folder(tmp_path_factory.mktemp("byte-level"), BYTE_LEVEL))


def pieces(codec: tokenizers.Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    stream = Detokenizer(codec.decode, prompt)
    return [*(stream.push(id) for id in ids), stream.flush()]


@given(ids_lists, ids_lists)
def test_pieces_of_any_ids_make_up_the_whole(prompt: list[int], ids: list[int]) -> None:
    """Any bytes, valid or not, after a prompt that ends with a whole character."""
    prompt = BYTE_LEVEL.encode(BYTE_LEVEL.decode(prompt)).ids
    assert "".join(pieces(BYTE_LEVEL, ids, prompt)) == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("codec", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@given(texts, texts)
def test_pieces_of_text_after_a_prompt(codec: tokenizers.Tokenizer, prompt: str, text: str) -> None:
    before = codec.encode(prompt).ids
    ids = [*before, *codec.encode(text, add_special_tokens=False).ids]
    got = pieces(codec, ids[len(before) :], before)
    assert "".join(got) == codec.decode(ids)[len(codec.decode(before)) :]


@given(texts.filter(lambda t: REPLACEMENT not in t))
def test_no_piece_holds_half_a_character(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    got = pieces(BYTE_LEVEL, ids)
    assert not any(REPLACEMENT in piece for piece in got)
    # What is settled is shown at once: after each id, all whole characters so far.
    shown = ""
    for n, piece in enumerate(got[:-1], 1):
        shown += piece
        assert shown == BYTE_LEVEL.decode(ids[:n]).rstrip(REPLACEMENT)


def test_a_character_of_four_tokens_comes_whole() -> None:
    ids = [BYTE_LEVEL.token_to_id(c) for c in ("ð", "Ł", "¦", "Ĭ")]  # the bytes F0 9F A6 8A
    assert pieces(BYTE_LEVEL, ids) == ["", "", "", "🦊", ""]
    assert pieces(BYTE_LEVEL, ids[:2]) == ["", "", REPLACEMENT]


def test_a_leading_space_survives_in_the_middle_of_a_text() -> None:
    before, ids = (
        BYTE_FALLBACK.encode("The head").ids,
        BYTE_FALLBACK.encode("is the target", add_special_tokens=False).ids,
    )
    assert "".join(pieces(BYTE_FALLBACK, ids, before)) == " is the target"
    assert "".join(pieces(BYTE_FALLBACK, ids)) == "is the target"


def test_a_prompt_of_byte_tokens_spoils_no_byte_that_follows() -> None:
    def of(text: str) -> list[int]:
        return [BYTE_FALLBACK.token_to_id(f"<0x{b:02X}>") for b in text.encode()]

    # The last five ids of the prompt begin inside a character.
    assert "".join(pieces(BYTE_FALLBACK, of("\x81"), of("\x80𐀀"))) == "\x81"


def test_special_tokens_between_do_not_make_a_new_beginning() -> None:
    before, after = (BYTE_FALLBACK.encode(t, add_special_tokens=False).ids for t in ("The head", "is"))
    ids = [*before, *[BYTE_FALLBACK.token_to_id("</s>")] * 7, *after]
    assert "".join(pieces(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids) == "The head is"


def test_text_shown_stays_where_a_decoder_changes_its_mind() -> None:
    byte = [BYTE_FALLBACK.token_to_id(f"<0x{b:02X}>") for b in (0x41, 0xFF)]
    assert BYTE_FALLBACK.decode(byte) == REPLACEMENT * 2
    got = pieces(BYTE_FALLBACK, [*byte, BYTE_FALLBACK.token_to_id("t")])
    assert got[0] == "A"
    assert "".join(got).endswith("t")


# -- stop strings -----------------------------------------------------------------------------------


def by_character(decoded: list[str], stop: Sequence[str], min_tokens: int) -> tuple[str, int | None, str | None]:
    """Text, tokens and stop string by looking at the text one character after the other.

    Args:
        decoded: the text that each token settles.
    """
    text = ""
    for count, piece in enumerate(decoded, 1):
        for character in piece:
            text += character
            done = [s for s in stop if text.endswith(s)]
            if done and count > min_tokens:
                longest = max(done, key=len)
                return text[: len(text) - len(longest)], count, longest
    return text, None, None


alphabet = st.sampled_from("ab é\n")
stops = st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=3, unique=True)


@given(st.text(alphabet, max_size=40), stops, st.integers(0, 6))
def test_the_first_stop_string_cuts_where_decoding_by_characters_does(
    chunky: Tokenizer, text: str, stop: list[str], min_tokens: int
) -> None:
    ids = chunky.encode(text)
    expected, count, string = by_character(pieces(CHUNKY, ids)[:-1], stop, min_tokens)
    stream = TextStream(chunky, stop=stop, min_tokens=min_tokens)
    shown = ""
    for id in ids:
        shown += stream.push(id)
        assert expected.startswith(shown)
        if stream.stopped:
            break
    else:
        shown += stream.finish()
    assert (shown, stream.text, stream.stopped) == (expected, expected, string)
    assert stream.tokens == (len(ids) if count is None else count)
    assert stream.push(ids[0] if ids else 5) == stream.finish() == "" or count is None


@given(st.text(alphabet, max_size=40), stops)
def test_only_what_may_begin_a_stop_string_is_held_back(chunky: Tokenizer, text: str, stop: list[str]) -> None:
    stream = TextStream(chunky, stop=stop)
    settled = ""
    ids = chunky.encode(text)
    for id, piece in zip(ids, pieces(CHUNKY, ids), strict=False):
        settled += piece
        stream.push(id)
        if stream.stopped:
            return
        held = settled[len(stream.text or "") :]
        assert settled == (stream.text or "") + held
        if held:
            assert any(s.startswith(held) and s != held for s in stop)
        for length in range(len(held) + 1, len(settled) + 1):
            assert not any(s.startswith(settled[-length:]) for s in stop)


@given(st.text(max_size=30), st.data())
def test_a_stop_string_taken_from_any_unicode_text_is_found(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    text = "." + text + "."
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = text[begin : data.draw(st.integers(begin + 1, len(text)))]
    stream = TextStream(tokenizer, stop=[stop])
    for id in tokenizer.encode(text + "x"):
        stream.push(id)
    assert stream.stopped == stop
    assert stream.text == text[: text.index(stop)]


@pytest.mark.parametrize(
    "stop, expected, string",
    [
        (["b", "a"], "", "a"),  # complete first, though named last
        (["aaab", "b"], "", "aaab"),  # complete at once: the longest
        (["b", "aaab"], "", "aaab"),
        (["ab", "aa"], "", "aa"),  # begins and ends before the other
        (["aab", "b"], "a", "aab"),
        (["aaab", "aa"], "", "aa"),
    ],
)
def test_several_stop_strings_in_one_token(chunky: Tokenizer, stop: list[str], expected: str, string: str) -> None:
    ids = chunky.encode("aaab")
    assert len(ids) == 1
    stream = TextStream(chunky, stop=stop)
    assert stream.push(ids[0]) == expected
    assert stream.stopped == string


def test_a_stop_string_inside_another(chunky: Tokenizer) -> None:
    ids = chunky.encode(" bab")
    assert len(ids) == 1
    stream = TextStream(chunky, stop=["bab", "a"])
    assert stream.push(ids[0]) == " b"
    assert stream.stopped == "a"


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b")
    for skip, expected in ((True, "ab"), (False, "a<|end|>b")):
        stream = TextStream(tokenizer, skip_special=skip)
        for id in ids:
            stream.push(id)
        stream.finish()
        assert stream.text == expected


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None)
    assert stream.push(3) == stream.finish() == ""
    assert stream.text is None
    assert stream.stopped is None
    with pytest.raises(NextnError, match="no tokenizer"):
        TextStream(None, stop=["x"])
