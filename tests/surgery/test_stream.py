"""Casts equal torch's bit for bit, FP8 with its scales too; the header is one that safetensors reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from nextn.checkpoint.header import read_header
from nextn.errors import NextnError
from nextn.surgery import stream
from nextn.surgery.plan import Part, Piece, Shard
from nextn.surgery.write import place_shard, quiet

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64), to=st.sampled_from(["BF16", "F16", "F32"]))
def test_float32_is_rounded_as_torch_rounds(bits: list[int], to: str) -> None:
    values = torch.tensor(np.array(bits, "<u4").view("<f4"))
    expected = values.to(TORCH[to])
    if (torch.isinf(expected) & torch.isfinite(values)).any():
        with pytest.raises(NextnError, match="does not fit"):
            stream.encode(stream.decode(_raw(values), "F32"), to, "w")
        return
    got = torch.frombuffer(bytearray(stream.encode(stream.decode(_raw(values), "F32"), to, "w")), dtype=TORCH[to])
    assert torch.equal(torch.isnan(got), torch.isnan(expected))
    assert _raw(torch.where(torch.isnan(got), 0, got)) == _raw(torch.where(torch.isnan(expected), 0, expected))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_value_survives_a_trip_through_float32(dtype: str) -> None:
    codes = np.arange(1 << 16, dtype="<u2").tobytes()
    there = torch.frombuffer(bytearray(codes), dtype=TORCH[dtype])
    wide = stream.decode(codes, dtype)
    assert torch.equal(torch.from_numpy(wide.copy()).nan_to_num(7), there.float().nan_to_num(7))
    back = np.frombuffer(stream.encode(wide, dtype, "w"), "<u2")
    finite = ~np.isnan(wide)
    assert (back[finite] == np.arange(1 << 16)[finite]).all()


@pytest.mark.parametrize("dtype, kind", [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_every_fp8_code_has_torch_s_value(dtype: str, kind: torch.dtype) -> None:
    codes = bytes(range(256))
    expected = torch.frombuffer(bytearray(codes), dtype=kind).float()
    got = torch.from_numpy(stream.decode(codes, dtype).copy())
    assert torch.equal(torch.isnan(got), torch.isnan(expected))
    assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(
    "shape, scale_shape, block",
    [
        ((256, 256), (2, 2), (128, 128)),
        ((200, 300), (2, 3), (128, 128)),
        ((7, 5), (7, 1), (1, 5)),
        ((7, 5), (7,), (1, 5)),
        ((7, 5), (), (7, 5)),
    ],
)
def test_fp8_times_its_scale(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int],
    scale_shape: tuple[int, ...],
    block: tuple[int, int],
) -> None:
    monkeypatch.setattr(stream, "CHUNK_BYTES", 4096)
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape) + 0.5
    save_file({"w": weight, "s": scale}, tmp_path / "a.safetensors")
    info, _ = read_header(tmp_path / "a.safetensors")
    parts = {k: Part(tmp_path / "a.safetensors", t.start, t.nbytes, t.dtype) for k, t in info.items()}
    piece = Piece("w", "w", "F32", shape, (parts["w"],), ("w", "s"), parts["s"], block)
    place_shard(tmp_path, Shard("b.safetensors", (piece,), {}), quiet)
    if len(scale_shape) == 2 and scale_shape[1] > 1:
        full = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    else:
        full = scale.reshape(-1, 1)
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("w"), weight.float() * full)


@given(
    st.lists(
        st.tuples(
            st.text('abc.é"\\', min_size=1, max_size=8),
            st.sampled_from([("F32", 4), ("BF16", 2), ("U8", 1), ("F64", 8)]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=6,
        unique_by=lambda t: t[0],
    )
)
def test_a_laid_out_header_is_one_that_safetensors_reads(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[str, tuple[str, int], list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("h")
    data = folder / "data"
    data.write_bytes(bytes(range(256)))
    pieces = []
    for key, (dtype, size), shape in tensors:
        pieces.append(Piece(key, key, dtype, tuple(shape), (Part(data, 0, int(np.prod(shape)) * size, dtype),)))
    ordered = stream.in_file_order(pieces)
    place_shard(folder, Shard("x.safetensors", ordered, {"format": "pt"}), quiet)
    with safe_open(
        folder / "x.safetensors", "np" if not any(d == "BF16" for _, (d, _), _ in tensors) else "pt"
    ) as file:
        assert sorted(file.keys()) == sorted(k for k, _, _ in tensors)
        assert file.metadata() == {"format": "pt"}
    found, _ = read_header(folder / "x.safetensors")
    sizes = dict(kind for _, kind, _ in tensors)
    assert all(info.start % sizes[info.dtype] == 0 for info in found.values())
    raw = (folder / "x.safetensors").read_bytes()
    for info in found.values():
        assert raw[info.start : info.start + info.nbytes] == bytes(range(256))[: info.nbytes]


def test_a_source_that_ends_early_is_an_error_in_every_way_of_reading(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"abc")
    for hashed in (False, True):
        piece = Piece("w", "w", "U8", (5,), (Part(tmp_path / "s", 0, 5, "U8"),))
        with pytest.raises(NextnError, match="ends before"):
            place_shard(tmp_path, Shard(f"out-{hashed}", (piece,), {}, hashed), quiet)


def test_copying_goes_on_where_the_kernel_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(stream, "CHUNK_BYTES", 1000)
    data = os.urandom(4321)
    (tmp_path / "s").write_bytes(data)
    target = os.open(tmp_path / "t", os.O_WRONLY | os.O_CREAT)
    moved: list[int] = []
    stream.copy_range(target, Part(tmp_path / "s", 21, 4300, "U8"), moved.append)
    os.close(target)
    assert (tmp_path / "t").read_bytes() == data[21:]
    assert sum(moved) == 4300
