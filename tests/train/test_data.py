"""Lines of every form become documents; bad ones are counted; order, shares and resuming are exact."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.errors import NextnError
from nextn.train.data import Batches, batches
from nextn.train.documents import LineReader
from nextn.train.formats import DataReport, MalformedError
from nextn.train.lines import Lines
from nextn.train.packing import PackedBatch
from tests.train.chats import PLAIN, chat_tokenizer

VOCAB = 97


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def numbered(path: Path, lengths: list[int]) -> Path:
    """Line n holds the id n, as often as its length says."""
    return write(path, [{"input_ids": [n % VOCAB] * length} for n, length in enumerate(lengths)])


def reader(max_length: int | None = 16) -> LineReader:
    return LineReader(None, vocab=VOCAB, max_length=max_length)


def contents(batch: PackedBatch) -> list[list[int]]:
    """The documents of a batch."""
    return [batch.ids[batch.documents == n].tolist() for n in range(int(batch.documents.max()) + 1)]


# Lines


@given(
    texts=st.lists(st.binary(max_size=30).filter(lambda b: b"\n" not in b and b"\r" not in b), max_size=12),
    end=st.booleans(),
    split=st.integers(0, 12),
    block=st.integers(1, 40),
)
@settings(max_examples=50)
def test_any_line_is_read_from_any_file(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], end: bool, split: int, block: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    halves = [texts[:split], texts[split:]]
    raw = [b"\n".join(half) + (b"\n" if end and half else b"") for half in halves]
    (folder / "a.jsonl").write_bytes(raw[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(raw[1]))
    (folder / "ignored.txt").write_text("not data\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nextn.train.lines.BLOCK_BYTES", block)
        lines = Lines([folder])
        got = [lines[i] for i in range(len(lines))]
    parts = [data.split(b"\n") for data in raw]
    assert got == [line for part in parts for line in (part[:-1] if part[-1] == b"" else part)]
    for i in range(len(lines)):
        name, _, number = lines.where(i).rpartition(":")
        data = raw[0] if name.endswith("a.jsonl") else raw[1]
        assert data.split(b"\n")[int(number) - 1] == got[i]


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"x" * 5000)[:-12])
    (tmp_path / "not.jsonl.gz").write_bytes(b"plain text")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("cut.jsonl.gz", "cannot be read"),
        ("not.jsonl.gz", "cannot be read"),
        ("empty", "no .jsonl file"),
        ("absent.jsonl", "no data file"),
    ):
        with pytest.raises(NextnError, match=message):
            Lines([tmp_path / name])


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\n')
    lines = Lines([tmp_path / "a.jsonl", tmp_path / "a.jsonl"])
    assert [lines[i] for i in range(len(lines))] == [b'{"text": "a"}', b'{"text": "b"}'] * 2
    assert lines.where(1).endswith("a.jsonl:2")


# Documents


@pytest.fixture(scope="module")
def chat_reader(tmp_path_factory: pytest.TempPathFactory) -> LineReader:
    tokenizer = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), PLAIN)
    return LineReader(tokenizer, vocab=420, eos_ids=tokenizer.eos_ids, max_length=64)


def test_every_form_of_line(chat_reader: LineReader) -> None:
    def read(line: Any) -> list[tuple[list[int], list[bool], str]]:
        return [
            (list(d.ids), list(d.loss_mask), d.domain)
            for d in chat_reader.read(json.dumps(line).encode(), DataReport())
        ]

    tokenizer = chat_reader.tokenizer
    assert tokenizer is not None
    text = tokenizer.encode("def accept(drafts):")
    assert read({"text": "def accept(drafts):", "domain": "code"}) == [(text, [True] * len(text), "code")]
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is."}]
    prompt = tokenizer.encode("<|start|>user\nWhy?<|end|>\n<|start|>assistant\n")
    answer = tokenizer.encode("Because it is.<|end|>")
    ids = prompt + answer + tokenizer.encode("\n")
    mask = [False] * len(prompt) + [True] * len(answer) + [False]
    assert read({"messages": messages}) == [(ids, mask, "")]
    sharegpt = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because it is."}]
    assert read({"conversations": sharegpt}) == [(ids, mask, "")]
    assert read({"conversations": messages, "domain": "chat"}) == [(ids, mask, "chat")]
    assert read({"input_ids": [1, 2, 3]}) == [([1, 2, 3], [True] * 3, "")]
    masked = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, True]}
    assert read({**masked, "messages": messages}) == [([1, 2, 3, 4], [False, False, True, True], "")]
    assert read({"documents": [masked, {"input_ids": [5, 6, 7]}]}) == [
        ([1, 2, 3, 4], [False, False, True, True], ""),
        ([5, 6, 7], [True] * 3, ""),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "empty line"),
        ("{", "not JSON"),
        ('{"text": "caf\udce9"}', "not UTF-8"),
        ("[1]", "not a JSON object"),
        ('{"prompt": "x"}', "none of text"),
        ('{"text": ""}', "text is not text"),
        ('{"text": "a", "domain": 3}', "domain"),
        ('{"messages": "x"}', "messages is not a list"),
        ('{"messages": [{"content": "x"}]}', "without a role"),
        ('{"messages": [{"role": "assistant"}]}', "without content"),
        ('{"conversations": [{"from": "martian", "value": "x"}]}', "unknown speaker"),
        ('{"input_ids": []}', "empty"),
        ('{"input_ids": [1, true]}', "list of ids"),
        ('{"input_ids": [1, 420]}', "outside the vocabulary of 420"),
        ('{"input_ids": [-1]}', "outside the vocabulary"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "differ in length"),
        ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', "0 and 1"),
        ('{"documents": [[1]]}', "documents"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "x"}', "tools is not a list"),
        ('{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 5}', "is not an object"),
    ],
)
def test_every_kind_of_malformed_line_is_named(chat_reader: LineReader, line: str, reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        chat_reader.read(line.encode("utf-8", "surrogateescape"), DataReport())


def test_a_model_without_tokenizer_or_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(NextnError, match="no tokenizer"):
        reader().read(b'{"text": "a"}', DataReport())
    plain = LineReader(chat_tokenizer(tmp_path, None), vocab=420)
    with pytest.raises(NextnError, match="no chat template"):
        plain.read(b'{"messages": [{"role": "user", "content": "a"}]}', DataReport())


def test_long_text_is_cut_into_pieces_and_a_long_answer_at_its_end() -> None:
    report = DataReport()
    text = reader(4).read(b'{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}', report)
    assert [list(d.ids) for d in text] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    answer = reader(4).read(b'{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "loss_mask": [0, 1, 1, 1, 1, 1, 1, 1]}', report)
    assert [list(d.ids) for d in answer] == [[1, 2, 3, 4]]
    assert reader(4).read(b'{"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 0, 1]}', report) == []
    assert (report.truncated, report.without_loss, report.documents, report.loss_tokens) == (3, 1, 3, 6)


# Batches

lengths = st.lists(st.integers(3, 16), min_size=1, max_size=60)


def make(path: Path, **options: Any) -> Batches:
    return batches([path], reader(), **{"batch_tokens": 16, **options})


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextn.train.data.WINDOW", 3)


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(3, 50), min_size=1, max_size=40), shuffle=st.booleans(), seed=st.integers(0, 2**40))
def test_an_epoch_holds_every_document_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shuffle: bool, seed: int
) -> None:
    path = numbered(tmp_path_factory.mktemp("d") / "a.jsonl", lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nextn.train.data.WINDOW", 3)
        run = make(path, epochs=2, shuffle=shuffle, seed=seed)
        found = list(run)
    both = sorted(d for batch in found for d in contents(batch))
    pieces = [[n] * min(16, length - at) for n, length in enumerate(lengths) for at in range(0, length, 16)]
    whole = [piece for piece in pieces if len(piece) > 2]
    assert both == sorted(whole * 2)
    assert all(batch.ids.shape == (1, 16) for batch in found)
    assert (run.report.lines, run.report.documents) == (len(lengths), len(whole))
    assert run.report.tokens == sum(map(len, whole))


@settings(max_examples=40)
@given(
    lengths=lengths, seed=st.integers(0, 99), world=st.integers(1, 4), then=st.integers(1, 4), stop=st.integers(0, 9)
)
def test_ranks_share_one_sequence_and_it_resumes_anywhere(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int, world: int, then: int, stop: int
) -> None:
    """Batch by batch: world ranks, then a resume with another number of ranks, equal one uninterrupted rank."""
    path = numbered(tmp_path_factory.mktemp("d") / "a.jsonl", lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nextn.train.data.WINDOW", 3)
        whole = list(itertools.islice(make(path, seed=seed), stop * world + 3 * then))
        got: list[PackedBatch] = []
        first = [make(path, seed=seed, rank=r, world=world) for r in range(world)]
        for _ in range(stop):
            got += [next(share) for share in first]
        states = [json.dumps(share.state_dict()) for share in first]
        assert len(set(states)) == 1
        second = [make(path, seed=seed, rank=r, world=then) for r in range(then)]
        for share in second:
            share.load_state_dict(json.loads(states[0]))
        for _ in range(3):
            got += [next(share) for share in second]
        assert second[0].report.lines <= len(lengths)
    assert [b.ids.tolist() for b in got] == [b.ids.tolist() for b in whole]
    assert [b.documents.tolist() for b in got] == [b.documents.tolist() for b in whole]


@pytest.mark.usefixtures("small_windows")
def test_seed_and_epoch_change_the_order(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", [5] * 90)
    per_epoch = 30

    def order(seed: int) -> list[list[int]]:
        return [d for batch in itertools.islice(make(path, seed=seed), 2 * per_epoch) for d in contents(batch)]

    a, again, b = order(1), order(1), order(2)
    assert a == again
    assert a != b
    assert a[:90] != a[90:]


def test_packing_wastes_little(tmp_path: Path) -> None:
    sizes = [3 + (n * 7) % 90 for n in range(1500)]
    path = numbered(tmp_path / "a.jsonl", sizes)
    found = list(batches([path], reader(256), batch_tokens=256, epochs=1))
    assert sum(sizes) / (256 * len(found)) > 0.98


def test_all_malformed_lines_are_counted_and_the_first_five_located(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("nonsense\n" * 7 + '{"input_ids": [1, 2, 3]}\n')
    made = batches([file], reader(), batch_tokens=16, epochs=1, shuffle=False)
    assert len(list(made)) == 1
    assert made.report.malformed == {"not JSON": 7}
    assert made.report.examples == [f"{file}:{n}: not JSON" for n in range(1, 6)]


def test_malformed_lines_are_counted_once_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\nnonsense\n\n{"input_ids": [1, 2]}\n{"x": 1}\n{"input_ids": [4, 5, 6]}\n')
    run = make(path, epochs=3)
    assert len(list(run)) == 3
    report = run.report
    assert report.malformed == {
        "not JSON": 1,
        "empty line": 1,
        "none of text, messages, conversations, input_ids": 1,
    }
    assert (report.lines, report.documents, report.without_loss) == (6, 2, 1)
    text = "\n".join(report.summary())
    assert "3 malformed lines" in text
    assert f"{path}:2: not JSON" in text


@pytest.mark.parametrize(
    "lines", [[], [{"input_ids": [1, 2]}], [{"x": 1}], [{"input_ids": [1] * 9, "loss_mask": [0] * 9}]]
)
def test_nothing_to_learn_is_an_error(tmp_path: Path, lines: list[Any]) -> None:
    with pytest.raises(NextnError, match="no token to predict in"):
        next(make(write(tmp_path / "a.jsonl", lines)))


def test_a_state_of_other_data_or_lengths_is_refused(tmp_path: Path) -> None:
    run = make(numbered(tmp_path / "a.jsonl", [5] * 9))
    next(run)
    for other in (
        make(numbered(tmp_path / "b.jsonl", [5] * 8)),
        make(tmp_path / "a.jsonl", seed=1),
        make(tmp_path / "a.jsonl", batch_tokens=32),
    ):
        with pytest.raises(NextnError, match="other data"):
            other.load_state_dict(run.state_dict())
    with pytest.raises(NextnError, match="max_length"):
        batches([tmp_path / "a.jsonl"], reader(), batch_tokens=8)
