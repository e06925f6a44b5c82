"""A head taken from the hub: only its own bytes are read, by ranges, and it merges as from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.surgery.extract import plan_extract
from nextn.surgery.merge import MergeOptions, plan_merge
from nextn.surgery.remote import BlockReader
from nextn.surgery.write import write as carry_out
from tests.checkpoint.test_hub import REPO, Server, server  # noqa: F401  (a fixture)
from tests.fixtures import checkpoint
from tests.surgery.builder import digest, head_of, headless, read, tiny_qwen3_5, tiny_qwen3_5_moe, write


def test_a_head_from_the_hub_is_read_by_ranges(server: Server, tmp_path: Path) -> None:  # noqa: F811
    folder = checkpoint(tiny_qwen3_5())
    folder.put({"model.language_model.layers.0.mlp.up_proj.weight": ("BF16", (4096, 32))})
    write(folder, server.root, 2)
    base = write(headless(tiny_qwen3_5()), tmp_path / "base", 1)
    remote = open_checkpoint(REPO)
    assert remote.root is None
    assert remote.remote is not None
    before, asked = remote.remote.bytes_read, remote.remote.requests
    carry_out(plan_merge(open_checkpoint(base), remote, tmp_path / "out", MergeOptions()))
    head = head_of(read(server.root))
    assert head_of(read(tmp_path / "out")) == head
    assert remote.remote.bytes_read - before < 1.2 * sum(len(raw) for _, _, raw in head.values()) + 4096
    assert remote.remote.requests - asked == 1
    carry_out(plan_extract(open_checkpoint(REPO), tmp_path / "head"))
    assert read(tmp_path / "head") == head
    with pytest.raises(NextnError, match="not on this machine"):
        plan_merge(open_checkpoint(REPO), remote, tmp_path / "no", MergeOptions())


def test_experts_from_the_hub_are_regrouped_too(server: Server, tmp_path: Path) -> None:  # noqa: F811
    config = tiny_qwen3_5_moe()
    write(checkpoint(config, experts="grouped"), server.root, 2)
    base = write(headless(config), tmp_path / "base", 1)
    local = open_checkpoint(server.root)
    for name, head in (("remote", open_checkpoint(REPO)), ("local", local)):
        carry_out(plan_merge(open_checkpoint(base), head, tmp_path / name, MergeOptions(experts="split")))
    assert digest(tmp_path / "remote") == digest(tmp_path / "local")


def test_a_hub_that_goes_away_leaves_no_out(server: Server, tmp_path: Path) -> None:  # noqa: F811
    write(checkpoint(tiny_qwen3_5()), server.root, 2)
    base = write(headless(tiny_qwen3_5()), tmp_path / "base", 1)
    plan = plan_merge(open_checkpoint(base), open_checkpoint(REPO), tmp_path / "out", MergeOptions())
    server.gone |= {p.name for p in server.root.glob("*.safetensors")}
    with pytest.raises(NextnError, match="changed on the hub"):
        carry_out(plan)
    assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".out")] == []


@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_blocks_give_the_bytes_asked_for_whatever_their_size(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("nextn.surgery.remote.BLOCK_BYTES", block)
    data = bytes(range(200))
    asked: list[tuple[int, int]] = []

    def read(name: str, start: int, length: int) -> bytes:
        asked.append((start, length))
        return data[start : start + length]

    reader = BlockReader(read, "f", 10, 150)
    for at, count in ((10, 140), (149, 1), (64, 20), (10, 0)):
        assert reader(at, count) == data[at : at + count]
    assert min(start for start, _ in asked) == 10
    assert max(start + length for start, length in asked) == 150
