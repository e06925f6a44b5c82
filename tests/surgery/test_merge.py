"""Merging: what lands in OUT, what is refused, and that the base stays as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.surgery.extract import plan_extract
from nextn.surgery.merge import MergeOptions, plan_merge
from nextn.surgery.plan import Plan
from nextn.surgery.write import write as carry_out
from tests.fixtures import HEAD_SHARD, TRUNK_SHARD, checkpoint
from tests.surgery.builder import (
    digest,
    head_of,
    headless,
    is_head,
    read,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_next,
    trunk_of,
    write,
)


def merge(base: Path, head: Path, out: Path, **options: Any) -> Plan:
    plan = plan_merge(open_checkpoint(base), open_checkpoint(head), out, MergeOptions(**options))
    carry_out(plan)
    return plan


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base that lost its head and a whole checkpoint of the same geometry."""
    return (
        write(headless(tiny_qwen3_5()), tmp_path / "base", 1),
        write(checkpoint(tiny_qwen3_5()), tmp_path / "donor", 2),
    )


@pytest.mark.parametrize("mode", ["hard", "symlink", "copy"])
def test_graft_takes_shards_over_and_adds_the_head(pair: tuple[Path, Path], tmp_path: Path, mode: str) -> None:
    base, donor = pair
    (base / "tokenizer.json").write_text("{}")
    (base / "sub").mkdir()
    (base / "sub" / "code.py").write_text("x = 1\n")
    before = digest(base)
    out = tmp_path / "out"
    merge(base, donor, out, link=mode)
    assert digest(base) == before
    assert read(out) == {**read(base), **head_of(read(donor))}
    for shard in (TRUNK_SHARD, HEAD_SHARD):
        assert (out / shard).is_symlink() == (mode == "symlink")
        assert (out / shard).samefile(base / shard) == (mode != "copy")
    assert not (out / "tokenizer.json").samefile(base / "tokenizer.json")
    assert (out / "sub" / "code.py").read_text() == "x = 1\n"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(read(out))
    assert index["metadata"]["total_size"] == sum(len(t[2]) for t in read(out).values())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_one_unnamed_shard_becomes_the_first_of_two(tmp_path: Path) -> None:
    folder = headless(tiny_qwen3_5())
    body = folder.shards.pop(TRUNK_SHARD) | folder.shards.pop(HEAD_SHARD)
    folder.shards = {"model.safetensors": body}
    base = write(folder, tmp_path / "base", 1)
    donor = write(checkpoint(tiny_qwen3_5()), tmp_path / "donor", 2)
    out = tmp_path / "out"
    merge(base, donor, out)
    assert not (out / "model.safetensors").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert {f for k, f in index.items() if is_head(k)} == {HEAD_SHARD}
    assert {f for k, f in index.items() if not is_head(k)} == {TRUNK_SHARD}
    assert (out / TRUNK_SHARD).samefile(base / "model.safetensors")


def test_a_base_with_a_head_needs_to_be_told(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, donor = pair
    other = write(checkpoint(tiny_qwen3_5()), tmp_path / "other", 5)
    with pytest.raises(NextnError, match="15 tensors of a head already") as caught:
        merge(other, donor, tmp_path / "out")
    assert "--replace" in caught.value.fix
    plan = merge(other, donor, tmp_path / "out", replace=True)
    assert plan.dropped == {HEAD_SHARD: "holds nothing but the old head"}
    assert read(tmp_path / "out") == {**trunk_of(read(other)), **head_of(read(donor))}
    assert not (tmp_path / "out" / HEAD_SHARD).exists()


def test_old_head_tensors_are_taken_out_of_a_shared_shard(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, donor = pair
    folder = checkpoint(tiny_qwen3_5())
    moved = list(folder.shards[HEAD_SHARD])[:4]
    folder.shards[TRUNK_SHARD] |= {k: folder.shards[HEAD_SHARD].pop(k) for k in moved}
    folder.shards[TRUNK_SHARD] = dict(sorted(folder.shards[TRUNK_SHARD].items(), key=lambda i: hash(i[0]) % 7))
    base = write(folder, tmp_path / "other", 5)
    before = digest(base)
    plan = merge(base, donor, tmp_path / "out", replace=True)
    assert set(plan.rewritten[TRUNK_SHARD]) == set(moved)
    assert digest(base) == before
    assert read(tmp_path / "out") == {**trunk_of(read(base)), **head_of(read(donor))}
    # Every file that lies in OUT is clean, named by the index or not.
    found = open_checkpoint(tmp_path / "out")
    assert not found.duplicates
    assert not found.unindexed_keys


@pytest.mark.parametrize("field, value", [("text_config", 0), ("text_config", None)])
def test_the_count_is_set_where_it_is_missing_or_zero(tmp_path: Path, field: str, value: int | None) -> None:
    donor = write(checkpoint(tiny_qwen3_5()), tmp_path / "donor", 2)
    folder = headless(tiny_qwen3_5())
    folder.config[field].pop("mtp_num_hidden_layers")
    if value is not None:
        folder.config[field]["mtp_num_hidden_layers"] = value
    plan = merge(write(folder, tmp_path / "base", 1), donor, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == tiny_qwen3_5()
    assert [e.path for e in plan.edits] == ["text_config.mtp_num_hidden_layers"]


def test_a_flat_config_gets_a_flat_count(tmp_path: Path) -> None:
    donor = write(checkpoint(tiny_qwen3_5()), tmp_path / "donor", 2)
    flat = dict(tiny_qwen3_5()["text_config"])
    del flat["mtp_num_hidden_layers"]
    flat["architectures"] = ["Qwen3_5ForCausalLM"]
    folder = headless(flat)
    merge(write(folder, tmp_path / "base", 1), donor, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**flat, "mtp_num_hidden_layers": 1}


def test_a_family_that_declares_nothing_is_left_silent(tmp_path: Path) -> None:
    donor = write(checkpoint(tiny_qwen3_next()), tmp_path / "donor", 2)
    base = write(headless(tiny_qwen3_next()), tmp_path / "base", 1)
    merge(base, donor, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_auto_casts_to_what_the_base_has(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = pair
    donor = write(checkpoint(tiny_qwen3_5(), dtype="F32"), tmp_path / "wide", 7)
    plan = merge(base, donor, tmp_path / "out")
    head, wide = head_of(read(tmp_path / "out")), head_of(read(donor))
    assert {p.cast for p in plan.head.pieces} == {"F32"}
    for key, (_, shape, raw) in wide.items():
        assert head[key][:2] == ("BF16", shape)
        values = np.frombuffer(raw, "<f4").astype(np.float64)
        got = (np.frombuffer(head[key][2], "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
        assert np.abs(got - values).max() <= (np.abs(values) * 2.0**-8).max()
    merge(base, donor, tmp_path / "kept", dtype="fp32")
    assert head_of(read(tmp_path / "kept")) == wide


def test_auto_keeps_tensors_that_the_base_s_own_layers_keep_wide(tmp_path: Path) -> None:
    folder = headless(tiny_qwen3_5())
    folder.shards[TRUNK_SHARD] |= {
        f"model.language_model.layers.{i}.input_layernorm.weight": ("F32", (32,)) for i in range(2)
    }
    for key in list(folder.shards[HEAD_SHARD]):
        assert "layers" not in key
    base = write(folder, tmp_path / "base", 1)
    donor = write(checkpoint(tiny_qwen3_5(), dtype="F32"), tmp_path / "donor", 2)
    merge(base, donor, tmp_path / "out")
    dtypes = {k: t[0] for k, t in head_of(read(tmp_path / "out")).items()}
    assert dtypes.pop("mtp.layers.0.input_layernorm.weight") == "F32"
    assert set(dtypes.values()) == {"BF16"}


def _stacked(split: dict[str, Any], experts: int) -> dict[str, Any]:
    """Split expert tensors stacked by numpy: gate rows above up rows, experts first."""
    at = "mtp.layers.0.mlp.experts"
    rest = {k: v for k, v in split.items() if ".experts." not in k}

    def matrix(key: str) -> np.ndarray:
        _, shape, raw = split[key]
        return np.frombuffer(raw, "<u2").reshape(shape)

    gate_up = np.stack(
        [
            np.concatenate([matrix(f"{at}.{e}.gate_proj.weight"), matrix(f"{at}.{e}.up_proj.weight")])
            for e in range(experts)
        ]
    )
    down = np.stack([matrix(f"{at}.{e}.down_proj.weight") for e in range(experts)])
    for key, value in (("gate_up_proj", gate_up), ("down_proj", down)):
        rest[f"{at}.{key}"] = ("BF16", value.shape, value.tobytes())
    return rest


def test_split_experts_are_stacked_and_stacked_ones_split(tmp_path: Path) -> None:
    config = tiny_qwen3_5_moe(experts=4)
    base = write(headless(config), tmp_path / "base", 1)
    split = write(checkpoint(config), tmp_path / "split", 2)
    merge(base, split, tmp_path / "stacked", experts="grouped")
    stacked = head_of(read(tmp_path / "stacked"))
    assert stacked == _stacked(head_of(read(split)), 4)
    merge(base, tmp_path / "stacked", tmp_path / "again", experts="split")
    assert head_of(read(tmp_path / "again")) == head_of(read(split))


@pytest.mark.parametrize(
    "config, own, engine, expected",
    [
        (tiny_qwen3_5_moe(), "grouped", None, "grouped"),
        (tiny_qwen3_5_moe(), "split", None, "split"),
        (tiny_qwen3_5_moe(), None, None, "grouped"),
        (tiny_qwen3_5_moe(), "grouped", "vllm", "split"),
        (tiny_qwen3_next(), "grouped", None, "split"),
    ],
)
def test_auto_follows_the_base_unless_an_engine_cannot_read_that(
    tmp_path: Path, config: dict[str, Any], own: str | None, engine: str | None, expected: str
) -> None:
    folder = headless(config)
    layer = "model.layers.0.mlp.experts."
    if own is not None:
        folder.shards[TRUNK_SHARD][layer + ("gate_up_proj" if own == "grouped" else "0.up_proj.weight")] = (
            "BF16",
            (2, 2),
        )
    base = write(folder, tmp_path / "base", 1)
    donor = write(checkpoint(config, experts="grouped"), tmp_path / "donor", 2)
    plan = merge(base, donor, tmp_path / "out", engine=engine)
    assert plan.facts["experts"] == expected
    assert ("mtp.layers.0.mlp.experts.gate_up_proj" in read(tmp_path / "out")) == (expected == "grouped")


def test_copies_of_shared_tensors_are_not_taken(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = pair
    donor = write(checkpoint(tiny_qwen3_5(), copies=True), tmp_path / "copies", 4)
    assert "mtp.embed_tokens.weight" in read(donor)
    plan = merge(base, donor, tmp_path / "out")
    assert "mtp.embed_tokens.weight" not in read(tmp_path / "out")
    assert list(plan.left_out) == ["mtp.embed_tokens.weight"]


def test_heads_that_do_not_belong_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = pair
    partial = checkpoint(tiny_qwen3_5())
    partial.drop(lambda k: k in ("mtp.fc.weight", "mtp.norm.weight"))
    moe = checkpoint(tiny_qwen3_5_moe())
    rotated = tiny_qwen3_5()
    rotated["text_config"] |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    extra = checkpoint(tiny_qwen3_5())
    extra.put({"mtp.layers.0.self_attn.sinks": ("BF16", (4,))})
    cases = {
        "partial": (partial, "partial: 2 of 15", "mtp.fc.weight"),
        "moe": (moe, "Qwen3.5 MoE head", "Qwen3.5 dense"),
        "rotated": (checkpoint(rotated), "[4]", "[8]"),
        "none": (headless(tiny_qwen3_5()), "no MTP head", ""),
        "extra": (extra, "does not know", "sinks"),
    }
    for name, (folder, said, also) in cases.items():
        write(folder, tmp_path / name, 3)
        with pytest.raises(NextnError) as caught:
            merge(base, tmp_path / name, tmp_path / "out")
        assert said in caught.value.what, name
        assert also in caught.value.what, name
        assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_geometry_that_shapes_do_not_show_is_refused(tmp_path: Path) -> None:
    config = tiny_qwen3_5_moe()
    base = write(headless(config), tmp_path / "base", 1)
    config["text_config"]["num_experts_per_tok"] = 1
    donor = write(checkpoint(config), tmp_path / "donor", 2)
    with pytest.raises(NextnError, match="experts_per_token = 1 and the base has experts_per_token = 2"):
        merge(base, donor, tmp_path / "out")


def test_bases_that_cannot_be_merged_into_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, donor = pair
    (tmp_path / "there").mkdir()
    with pytest.raises(NextnError, match="exists already"):
        merge(base, donor, tmp_path / "there")
    with pytest.raises(NextnError, match="inside the base"):
        merge(base, donor, base / "out")
    with pytest.raises(NextnError, match="does not exist"):
        merge(base, donor, tmp_path / "no" / "out")
    (base / HEAD_SHARD).unlink()
    with pytest.raises(NextnError, match="incomplete"):
        merge(base, donor, tmp_path / "out")
    (base / HEAD_SHARD).write_bytes(b"junk")
    with pytest.raises(NextnError, match="cannot be used"):
        merge(base, donor, tmp_path / "out")


def test_an_index_that_still_names_a_lost_head_is_mended(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, donor = pair
    base = write(checkpoint(tiny_qwen3_5()), tmp_path / "lost", 5)
    (base / HEAD_SHARD).unlink()
    merge(base, donor, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {TRUNK_SHARD, "model-mtp.safetensors"}
    assert trunk_of(read(tmp_path / "out")).keys() == checkpoint(tiny_qwen3_5()).shards[TRUNK_SHARD].keys()
    assert head_of(read(tmp_path / "out")) == head_of(read(donor))


def test_hub_cache_snapshots_are_linked_to_their_blobs(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, donor = pair
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    for at, path in enumerate(sorted(base.iterdir())):
        (blobs / str(at)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../blobs/{at}")
    merge(snapshot, donor, tmp_path / "out")
    merge(snapshot, donor, tmp_path / "out2", link="symlink")
    assert read(tmp_path / "out") == read(tmp_path / "out2") == {**read(base), **head_of(read(donor))}
    assert not (tmp_path / "out" / TRUNK_SHARD).is_symlink()
    assert Path(os.readlink(tmp_path / "out2" / TRUNK_SHARD)).parent == blobs


def test_extract_is_small_and_says_from_what(pair: tuple[Path, Path], tmp_path: Path) -> None:
    import hashlib

    base, donor = pair
    out = tmp_path / "head"
    carry_out(plan_extract(open_checkpoint(donor), out))
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    assert read(out) == head_of(read(donor))
    card = (out / "README.md").read_text()
    lines = "".join(f"{k} {hashlib.sha256(t[2]).hexdigest()}\n" for k, t in sorted(head_of(read(donor)).items()))
    assert hashlib.sha256(lines.encode()).hexdigest() in card
    for _, _, raw in head_of(read(donor)).values():
        assert hashlib.sha256(raw).hexdigest() in card
    with pytest.raises(NextnError, match="no MTP head"):
        plan_extract(open_checkpoint(base), tmp_path / "none")


def test_a_plan_changes_nothing_and_json_says_what_the_screen_says(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, donor = pair
    before = digest(tmp_path)
    command = [sys.executable, "-m", "nextn.cli", "merge", str(base), str(donor), str(tmp_path / "out"), "--plan"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert digest(tmp_path) == before
    assert "would merge 15 tensors" in shown
    assert "nothing was written" in shown
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    value = json.loads(done.stdout)
    assert digest(tmp_path) == before
    assert (value["tensors"], value["written"], value["family"]) == (15, False, "qwen3_5")
    assert sum(t["bytes"] for t in value["head_tensors"]) == value["bytes"]
    failed = subprocess.run([*command[:-1], "--dtype", "int4"], capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 2
    assert "Traceback" not in failed.stderr


def test_merge_and_extract_import_no_torch(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, donor = pair
    code = (
        "import sys; from nextn.cli import main\n"
        "for a in (['extract', sys.argv[2], sys.argv[3] + '/h'],"
        " ['merge', sys.argv[1], sys.argv[3] + '/h', sys.argv[3] + '/out', '--dtype', 'fp32']):\n"
        "    try:\n        main(a)\n    except SystemExit as end:\n        assert not end.code\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(base), str(donor), str(tmp_path)], check=True, capture_output=True)
    assert {t[0] for t in head_of(read(tmp_path / "out")).values()} == {"F32"}
