"""Local checkpoints: what is listed, and which kinds of damage are facts and which are errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nextn.checkpoint.listing import inside
from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from tests.checkpoint.sparse_files import write_index, write_sparse

A, B = {"a": ("BF16", (2, 3))}, {"b": ("F32", (4,))}


def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_sparse(tmp_path / "model-1.safetensors", A)
    write_sparse(tmp_path / "model-2.safetensors", B)
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    return tmp_path


def test_clean_folder(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder(tmp_path))
    assert checkpoint.kind == "safetensors"
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.files == ("model-1.safetensors", "model-2.safetensors")
    assert {k: (t.dtype, t.shape, t.file, t.nbytes) for k, t in checkpoint.tensors.items()} == {
        "a": ("BF16", (2, 3), "model-1.safetensors", 12),
        "b": ("F32", (4,), "model-2.safetensors", 16),
    }
    assert checkpoint.absent_files == checkpoint.unindexed_files == checkpoint.unindexed_keys == ()
    assert checkpoint.unreadable == checkpoint.misplaced == checkpoint.duplicates == {}
    assert checkpoint.remote is None
    assert checkpoint.json("config.json") == {"model_type": "llama"}
    assert checkpoint.json("hf_quant_config.json") is None


def test_what_the_index_claims_is_compared(tmp_path: Path) -> None:
    root = folder(tmp_path)
    write_sparse(root / "mtp.safetensors", {"mtp.fc.weight": ("BF16", (2, 4)), "a": ("BF16", (1,))})
    write_index(root, {"a": "model-1.safetensors", "c": "model-2.safetensors", "d": "model-3.safetensors"})
    checkpoint = open_checkpoint(root)
    assert checkpoint.absent_files == ("model-3.safetensors",)
    assert checkpoint.unindexed_files == ("mtp.safetensors",)
    assert sorted(checkpoint.unindexed_keys) == ["b", "mtp.fc.weight"]
    assert checkpoint.misplaced == {"c": "model-2.safetensors"}
    assert checkpoint.duplicates == {"a": ("model-1.safetensors", "mtp.safetensors")}
    assert checkpoint.tensors["a"].file == "model-1.safetensors"


def test_one_damaged_shard_is_a_fact(tmp_path: Path) -> None:
    root = folder(tmp_path)
    (root / "model-2.safetensors").write_bytes(b"\xff" * 100)
    checkpoint = open_checkpoint(root)
    assert list(checkpoint.tensors) == ["a"]
    assert "claims a header" in checkpoint.unreadable["model-2.safetensors"]
    assert checkpoint.misplaced == {}
    with pytest.raises(NextnError, match="claims a header"):
        open_checkpoint(root / "model-2.safetensors")


def test_nothing_readable_left_is_an_error(tmp_path: Path) -> None:
    root = folder(tmp_path)
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (root / name).write_bytes(b"")
    with pytest.raises(NextnError, match="No weight file"):
        open_checkpoint(root)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_damaged_index_is_a_fact(tmp_path: Path, index: str) -> None:
    root = folder(tmp_path)
    (root / "model.safetensors.index.json").write_text(index)
    checkpoint = open_checkpoint(root)
    assert list(checkpoint.unreadable) == ["model.safetensors.index.json"]
    assert checkpoint.index is None
    assert sorted(checkpoint.tensors) == ["a", "b"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "C:\\b", "..\\b", "a\x00b", ""])
def test_index_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    root = folder(tmp_path)
    write_index(root, {"a": name})
    assert not inside(name)
    with pytest.raises(NextnError, match="outside"):
        open_checkpoint(root)


def test_files_in_subfolders_that_the_index_names_are_read(tmp_path: Path) -> None:
    root = folder(tmp_path)
    (root / "head").mkdir()
    write_sparse(root / "head" / "mtp.safetensors", {"mtp.fc.weight": ("BF16", (2, 4))})
    write_index(root, {"mtp.fc.weight": "head/mtp.safetensors"})
    assert open_checkpoint(root).tensors["mtp.fc.weight"].file == "head/mtp.safetensors"


@pytest.mark.parametrize("config", ["[]", "{", "\x00", "NaN", '"x"', "[" * 5000])
def test_a_config_that_is_no_object_is_an_error(tmp_path: Path, config: str) -> None:
    root = folder(tmp_path)
    (root / "config.json").write_text(config)
    with pytest.raises(NextnError, match=r"config\.json"):
        open_checkpoint(root)


def test_infinity_in_a_config_is_read(tmp_path: Path) -> None:
    root = folder(tmp_path)
    (root / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert open_checkpoint(root).config == {"time_step_limit": [0.0, float("inf")]}


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    root = folder(tmp_path)
    (root / "model-2.safetensors").unlink()
    (root / "model-2.safetensors").symlink_to(root / "model-2.safetensors")
    os.mkfifo(root / "model-3.safetensors")
    checkpoint = open_checkpoint(root)
    assert checkpoint.absent_files == ("model-2.safetensors",)
    assert "leads nowhere" in checkpoint.unreadable["model-2.safetensors"]
    with pytest.raises(NextnError):
        open_checkpoint(root / "model-2.safetensors")


def test_single_file_with_and_without_config(tmp_path: Path) -> None:
    write_sparse(tmp_path / "mtp.safetensors", A)
    alone = open_checkpoint(tmp_path / "mtp.safetensors")
    assert (alone.config, list(alone.tensors), alone.files) == ({}, ["a"], ("mtp.safetensors",))
    (tmp_path / "config.json").write_text('{"model_type": "glm4_moe"}')
    assert open_checkpoint(tmp_path / "mtp.safetensors").config == {"model_type": "glm4_moe"}


def test_folder_without_config_lists_its_weights(tmp_path: Path) -> None:
    write_sparse(tmp_path / "x.safetensors", A)
    assert open_checkpoint(tmp_path).config == {}
    with pytest.raises(NextnError, match="neither"):
        open_checkpoint(tmp_path.parent / "nothing-here")


@pytest.mark.parametrize("source", ["", "a", "./a/b", "a/b/c/d", "x" * 5000, "a\x00b", "~/m", "/none/there"])
def test_sources_that_are_nothing(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NextnError):
        open_checkpoint(source)


def test_1600_tensors_in_100_shards_within_a_quarter_second(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weight_map = {}
    for shard in range(100):
        tensors = {f"mtp.layers.0.mlp.experts.{shard}.{i}.weight": ("BF16", (512, 2048)) for i in range(16)}
        write_sparse(tmp_path / f"model-{shard:05d}.safetensors", tensors)
        weight_map |= dict.fromkeys(tensors, f"model-{shard:05d}.safetensors")
    write_index(tmp_path, weight_map)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        checkpoint = open_checkpoint(tmp_path)
        seconds.append(time.perf_counter() - began)
    assert len(checkpoint.tensors) == 1600
    assert min(seconds) < 0.25


def test_listing_imports_no_heavy_library() -> None:
    code = (
        "import sys, nextn.checkpoint.source, nextn.checkpoint.hub\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'numpy', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
