"""Safetensors headers: what is accepted is what the safetensors library accepts, and nothing else raises."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from nextn.checkpoint.header import read_header
from nextn.errors import NextnError
from tests.checkpoint.sparse_files import write_raw

TWO = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def test_agrees_with_the_library(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((5,), np.float16), "c": np.zeros((0, 4))}
    save_file(arrays, path, metadata={"format": "pt"})
    tensors, metadata = read_header(path)
    assert metadata == {"format": "pt"}
    assert {k: (t.dtype, t.shape) for k, t in tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (5,)),
        "c": ("F64", (0, 4)),
    }
    raw = path.read_bytes()
    for key, info in tensors.items():
        assert raw[info.start : info.start + info.nbytes] == arrays[key].tobytes()


@pytest.mark.parametrize(
    ("header", "data_bytes", "accepted"),
    [
        (json.dumps({"a": TWO}).encode(), 8, True),
        (json.dumps({"a": TWO}).encode() + b"   ", 8, True),
        (json.dumps({"__metadata__": None, "a": TWO}).encode(), 8, True),
        (b"{}", 0, True),
        (json.dumps({"a": TWO}).encode(), 9, False),
        (json.dumps({"a": TWO}).encode(), 7, False),
        (json.dumps({"a": TWO, "b": {**TWO, "data_offsets": [12, 20]}}).encode(), 20, False),
        (json.dumps({"a": TWO, "b": {**TWO, "data_offsets": [4, 12]}}).encode(), 12, False),
        (json.dumps({"a": TWO, "b": {**TWO, "shape": [3], "data_offsets": [8, 16]}}).encode(), 16, False),
        (json.dumps({"__metadata__": {"x": 1}, "a": TWO}).encode(), 8, False),
        (json.dumps({"__metadata__": [1], "a": TWO}).encode(), 8, False),
        (json.dumps({"a": {**TWO, "dtype": "Q9"}}).encode(), 8, False),
        (json.dumps({"a": {**TWO, "shape": [-2]}}).encode(), 8, False),
        (json.dumps({"a": {**TWO, "shape": [2.0]}}).encode(), 8, False),
        (json.dumps({"a": {**TWO, "shape": "2"}}).encode(), 8, False),
        (json.dumps({"a": {**TWO, "shape": [1 << 70]}}).encode(), 8, False),
        (json.dumps({"a": {**TWO, "data_offsets": [-8, 0]}}).encode(), 8, False),
        (json.dumps({"a": {**TWO, "data_offsets": [0, 8, 8]}}).encode(), 8, False),
        (json.dumps({"a": [1]}).encode(), 8, False),
        (b"[1]", 0, False),
        (b'{"a\xff": {}}', 0, False),
        (b"", 0, False),
    ],
)
def test_accepts_what_the_library_accepts(tmp_path: Path, header: bytes, data_bytes: int, accepted: bool) -> None:
    path = tmp_path / "x.safetensors"
    write_raw(path, header, data_bytes)
    try:
        safetensors.safe_open(path, "np").__enter__()
        by_library = True
    except safetensors.SafetensorError:
        by_library = False
    assert by_library is accepted
    if accepted:
        read_header(path)
    else:
        with pytest.raises(NextnError):
            read_header(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b'{"a":' + json.dumps(TWO).encode() + b', "a":' + json.dumps(TWO).encode() + b"}", "'a' twice"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b"[" + b"[]," * 1_000_000 + b"[]]", "more values"),
        (b"1" * 10_000, "not valid JSON"),
        (b'{"a\\ud800":' + json.dumps(TWO).encode() + b"}", "not valid JSON"),
        (json.dumps({"a": {**TWO, "shape": [1 << 61] * 5000}}).encode(), "no valid shape"),
    ],
)
def test_hostile_headers_are_refused_quickly(tmp_path: Path, header: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    write_raw(path, header, 8)
    with pytest.raises(NextnError, match=words):
        read_header(path)


def test_length_field_beyond_the_file_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 99_000_000) + b"{}")
    with pytest.raises(NextnError, match="99000000 bytes in a file of 10 bytes"):
        read_header(path)


def test_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(NextnError, match="git-lfs"):
        read_header(path)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entry=st.fixed_dictionaries({}, optional={"dtype": json_values, "shape": json_values, "data_offsets": json_values}),
    data_bytes=st.integers(0, 40),
)
def test_any_entry_is_read_or_refused(tmp_path: Path, entry: dict[str, Any], data_bytes: int) -> None:
    path = tmp_path / "x.safetensors"
    write_raw(path, json.dumps({"a": TWO, "b": entry}).encode(), data_bytes)
    try:
        tensors, _ = read_header(path)
    except NextnError:
        return
    assert sum(t.nbytes for t in tensors.values()) == data_bytes


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    try:
        tensors, _ = read_header(path)
    except NextnError:
        return
    assert tensors == {}
