"""GGUF headers against files that the gguf package writes, and against damage."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nextn.checkpoint.gguf import GGML_TYPES, parse_gguf, read_gguf, split_names
from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError


def write(
    path: Path, tensors: dict[str, np.ndarray], types: dict[str, gguf.GGMLQuantizationType] | None = None
) -> None:
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_block_count(5)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_float32("qwen35.rope.freq_base", 0.5)
    writer.add_bool("some.flag", True)
    writer.add_array("short", [1, 2, 3])
    writer.add_token_list([f"token {i} é" for i in range(70)])
    writer.add_array("long", list(range(65)))
    for key, array in tensors.items():
        kind = (types or {}).get(key)
        if kind is None:
            writer.add_tensor(key, array)
        else:
            writer.add_tensor(key, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_type_table_is_ggml_s() -> None:
    theirs = {int(t): (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    assert theirs == GGML_TYPES


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    arrays = {
        "blk.4.nextn.eh_proj.weight": rng.standard_normal((8, 64)).astype(np.float32),
        "blk.4.ffn_down.weight": rng.standard_normal((4, 96)).astype(np.float32),
        "blk.4.nextn.enorm.weight": np.ones(64, np.float32),
        "half": np.ones((3, 5), np.float16),
    }
    types = {"blk.4.ffn_down.weight": gguf.GGMLQuantizationType.Q8_0}
    write(path, arrays, types)
    checkpoint = open_checkpoint(path)
    reader = gguf.GGUFReader(path)
    assert checkpoint.kind == "gguf"
    assert checkpoint.config == {}
    assert list(checkpoint.tensors) == [t.name for t in reader.tensors]
    for theirs in reader.tensors:
        ours = checkpoint.tensors[theirs.name]
        assert ours.dtype == theirs.tensor_type.name
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.start, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
    assert checkpoint.tensors["blk.4.nextn.eh_proj.weight"].shape == (8, 64)
    assert checkpoint.gguf["general.architecture"] == "qwen35"
    assert checkpoint.gguf["qwen35.block_count"] == 5
    assert checkpoint.gguf["qwen35.nextn_predict_layers"] == 1
    assert checkpoint.gguf["qwen35.rope.freq_base"] == 0.5
    assert checkpoint.gguf["some.flag"] is True
    assert checkpoint.gguf["short"] == [1, 2, 3]
    assert checkpoint.gguf["tokenizer.ggml.tokens"] == {"length": 70}
    assert checkpoint.gguf["long"] == {"length": 65}


@pytest.mark.parametrize("first_bytes", [1, 24, 100, 1 << 20])
def test_the_window_does_not_change_the_answer(tmp_path: Path, first_bytes: int) -> None:
    path = tmp_path / "m.gguf"
    write(path, {"a": np.ones((2, 32), np.float32)})
    raw = path.read_bytes()
    answer = parse_gguf(lambda at, n: raw[at : at + n], len(raw), "m.gguf", first_bytes=first_bytes)
    assert answer == read_gguf(path)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    for number, key in ((1, "a"), (3, "c")):
        write(tmp_path / f"m-{number:05d}-of-00003.gguf", {key: np.ones((2, 32), np.float32)})
    checkpoint = open_checkpoint(tmp_path / "m-00003-of-00003.gguf")
    assert {k: t.file for k, t in checkpoint.tensors.items()} == {
        "a": "m-00001-of-00003.gguf",
        "c": "m-00003-of-00003.gguf",
    }
    assert checkpoint.absent_files == ("m-00002-of-00003.gguf",)
    (tmp_path / "mmproj-m.gguf").write_bytes(b"")
    assert open_checkpoint(tmp_path).tensors == checkpoint.tensors


def test_several_models_in_a_folder_are_named(tmp_path: Path) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf"):
        write(tmp_path / name, {"a": np.ones((2, 32), np.float32)})
    with pytest.raises(NextnError, match=r"2 GGUF models.*m-Q4_K_M\.gguf, m-Q8_0\.gguf"):
        open_checkpoint(tmp_path)


def test_split_numbering() -> None:
    assert split_names("m.gguf") == ("m.gguf",)
    assert split_names("m-00002-of-00002.gguf") == ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    for bad in ("m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-00001-of-99999.gguf"):
        with pytest.raises(NextnError):
            split_names(bad)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(key) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def document(*, version: int = 3, tensors: int = 0, pairs: int = 0, body: bytes = b"", data: int = 0) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body
    return head + bytes(-len(head) % 32) + bytes(data)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"GGML" + bytes(40), "no GGUF"),
        (b"GGUF", "no GGUF"),
        (document(version=1), "version 1"),
        (document(version=3 << 24), "big-endian"),
        (document(tensors=1 << 40), "tensors and"),
        (document(pairs=1 << 40), "tensors and"),
        (document(pairs=50_000), "ends inside"),
        (document(pairs=1, body=struct.pack("<Q", 1 << 60)), "string of"),
        (document(pairs=1, body=text("k") + struct.pack("<IIQ", 9, 0, 1 << 50)), "ends inside"),
        (document(pairs=1, body=text("k") + struct.pack("<IIQ", 9, 8, 1 << 50)), "list of"),
        (document(pairs=1, body=text("k") + struct.pack("<IIQ", 9, 8, 100) + text("x" * 9) * 3), "ends inside"),
        (document(pairs=1, body=text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9), "unknown kind"),
        (document(pairs=1, body=text("k") + struct.pack("<I", 77)), "unknown kind"),
        (document(pairs=2, body=(text("k") + struct.pack("<IB", 0, 1)) * 2), "twice"),
        (document(pairs=1, body=text("general.alignment") + struct.pack("<II", 4, 3)), "alignment"),
        (document(tensors=1, body=text("t") + struct.pack("<I", 1 << 30)), "dimensions"),
        (document(tensors=1, body=entry("t", (8,), 0, 0), data=31), "truncated"),
        (document(tensors=1, body=entry("t", (1 << 63, 1 << 63), 0, 0), data=32), "truncated"),
        (document(tensors=1, body=entry("t", (8,), 0, 1 << 63), data=32), "truncated"),
        (document(tensors=1, body=entry("t", (33,), 8, 0), data=99), "multiple"),
        (document(tensors=2, body=entry("t", (8,), 0, 0) * 2, data=32), "twice"),
        (document(tensors=2, body=entry("t", (8,), 0, 0) + entry("u", (8,), 0, 0), data=32), "overlaps"),
    ],
)
def test_damage_is_named(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(NextnError, match=words):
        open_checkpoint(path)


def test_unknown_type_takes_the_room_to_the_next_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(document(tensors=2, body=entry("t", (8,), 99, 0) + entry("u", (8,), 0, 64), data=96))
    tensors = open_checkpoint(path).tensors
    assert (tensors["t"].dtype, tensors["t"].nbytes) == ("TYPE_99", 64)
    assert (tensors["u"].dtype, tensors["u"].nbytes) == ("F32", 32)


def test_metadata_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(document(pairs=1, body=text("k") + struct.pack("<IB", 0, 7)))
    checkpoint = open_checkpoint(path)
    assert checkpoint.gguf == {"k": 7}
    assert checkpoint.tensors == {}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 900),
)
def test_any_damage_is_read_or_refused(tmp_path: Path, changes: list[tuple[int, int]], cut: int) -> None:
    path = tmp_path / "m.gguf"
    if not path.exists():
        write(path, {"a": np.ones((2, 32), np.float32), "b": np.ones((3,), np.float32)})
    raw = bytearray(path.read_bytes())
    for at, value in changes:
        raw[at % len(raw)] = value
    del raw[len(raw) - cut :]
    try:
        tensors, _ = parse_gguf(lambda at, n: bytes(raw[at : at + n]), len(raw), "m.gguf")
    except NextnError:
        return
    assert all(t.start + t.nbytes <= len(raw) for t in tensors.values())
