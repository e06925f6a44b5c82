"""Findings about the head, its files and its values, each on the smallest input that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nextn.assets import embedded_model
from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.examine import examine
from tests.fixtures import HEAD_SHARD, TRUNK_SHARD, checkpoint, qwen3_5, qwen3_5_moe
from tests.inspect.asking import SMALL, ask, codes, small, tensors


def test_an_unknown_family_without_anything_like_a_head(tmp_path: Path) -> None:
    folder = small()
    folder.config = {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"]}
    folder.drop(lambda k: k.startswith("mtp."))
    report = ask(folder, tmp_path)
    assert codes(report) == {"family-unknown": "info"}
    assert report.as_json()["family"] is None
    assert {v.verdict for v in report.engines.values()} == {"unknown", "unsupported"}


def test_an_unknown_family_with_tensors_that_look_like_a_head(tmp_path: Path) -> None:
    folder = small()
    folder.config = {"model_type": "brand_new"}
    report = ask(folder, tmp_path)
    assert codes(report) == {"family-unknown": "warning"}
    assert set(tensors(report, "family-unknown")) == set(folder.head)


def test_a_family_that_ships_none_and_declares_none(tmp_path: Path) -> None:
    folder = small()
    folder.config["text_config"]["mtp_num_hidden_layers"] = 0
    folder.drop(lambda k: k.startswith("mtp."))
    report = ask(folder, tmp_path)
    assert codes(report) == {"no-head": "info"}
    assert {v.verdict for v in report.engines.values()} == {"unsupported"}


@given(lost=st.sets(st.integers(0, 14), min_size=1, max_size=14))
def test_any_part_of_a_head_that_is_lost_is_named(lost: set[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = small()
    keys = list(folder.head)
    gone = {keys[i] for i in lost}
    folder.drop(gone.__contains__)
    report = ask(folder, tmp_path_factory.mktemp("partial"))
    assert set(report.facts.missing) == gone
    assert report.facts.found == 15 - len(gone)
    assert codes(report) == {"head-partial": "error"}
    assert set(tensors(report, "head-partial")) == gone


@pytest.mark.parametrize(("declared", "held"), [(2, 1), (1, 2), (3, 2)])
def test_a_count_that_does_not_fit_the_layers_found(declared: int, held: int, tmp_path: Path) -> None:
    folder = checkpoint(qwen3_5(**SMALL, mtp=declared), layers=held)
    report = ask(folder, tmp_path)
    assert "count-mismatch" in codes(report)
    assert report.facts.layers == tuple(range(held))
    assert ("heads-unused" in codes(report)) == (held > 1)


def test_a_gap_between_head_layers_is_a_partial_head(tmp_path: Path) -> None:
    folder = checkpoint(qwen3_5(**SMALL, mtp=3), layers=3)
    folder.drop(lambda k: k.startswith("mtp.layers.1."))
    report = ask(folder, tmp_path)
    assert report.facts.layers == (0, 2)
    assert len(report.facts.missing) == 11
    assert codes(report)["head-partial"] == "error"


def test_a_huge_layer_number_costs_nothing(tmp_path: Path) -> None:
    folder = small()
    folder.put({"mtp.layers.999999.mlp.gate_proj.weight": ("BF16", (512, 256))})
    report = ask(folder, tmp_path)
    assert len(report.facts.expected) < 2000
    assert codes(report)["head-partial"] == "error"


def test_another_drafter_under_the_same_prefix(tmp_path: Path) -> None:
    folder = small()
    folder.drop(lambda k: k.startswith("mtp."))
    drafter = {"mtp.0.main_proj.weight": ("BF16", (256, 256)), "mtp.0.markov_head.weight": ("BF16", (256, 256))}
    folder.put(drafter)
    report = ask(folder, tmp_path)
    assert codes(report) == {"not-an-mtp-head": "error"}
    assert set(tensors(report, "not-an-mtp-head")) == set(drafter)
    assert report.engines["sglang"].verdict == "fails"


def test_a_tensor_that_no_head_has(tmp_path: Path) -> None:
    folder = small()
    folder.put({"mtp.extra.weight": ("BF16", (8, 8))})
    report = ask(folder, tmp_path)
    assert tensors(report, "tensors-unexpected") == ("mtp.extra.weight",)
    assert report.as_json()["tensors"]["unexpected"] == ["mtp.extra.weight"]
    assert report.facts.complete


@pytest.mark.parametrize(
    ("key", "mixed"),
    [("mtp.fc.weight", True), ("mtp.layers.0.mlp.up_proj.weight", True), ("mtp.norm.weight", False)],
)
def test_matrices_in_several_dtypes_but_norms_may_differ(key: str, mixed: bool, tmp_path: Path) -> None:
    folder = small()
    folder.head[key] = ("F32", folder.head[key][1])
    report = ask(folder, tmp_path)
    assert codes(report) == ({"dtype-mixed": "warning"} if mixed else {})
    if mixed:
        assert tensors(report, "dtype-mixed") == (key,)


def test_copies_of_the_embedding_are_said_and_are_no_defect(tmp_path: Path) -> None:
    folder = checkpoint(qwen3_5(**SMALL), copies=True)
    report = ask(folder, tmp_path)
    assert codes(report) == {"embedding-duplicated": "info"}
    assert tensors(report, "embedding-duplicated") == ("mtp.embed_tokens.weight",)
    assert len(report.facts.expected) == 15


def test_a_shard_that_is_not_there_is_not_a_lost_head(tmp_path: Path) -> None:
    folder = small()
    folder.write(tmp_path)
    (tmp_path / HEAD_SHARD).unlink()
    report = examine(open_checkpoint(tmp_path))
    assert codes(report) == {"shard-missing": "error"}
    assert set(tensors(report, "shard-missing")) == set(folder.head)
    assert not report.facts.complete
    assert report.engines["vllm"].error.startswith("FileNotFoundError")


def test_an_index_that_lists_what_no_file_holds(tmp_path: Path) -> None:
    folder = small()
    folder.index = {k: f for f, found in folder.shards.items() for k in found} | {"model.lost.weight": TRUNK_SHARD}
    report = ask(folder, tmp_path)
    assert codes(report) == {"index-stale": "warning"}
    assert tensors(report, "index-stale") == ("model.lost.weight",)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    folder = small()
    folder.put({"mtp.fc.weight": ("BF16", (256, 512))}, TRUNK_SHARD)
    report = ask(folder, tmp_path)
    assert codes(report) == {"key-duplicated": "warning"}
    assert tensors(report, "key-duplicated") == ("mtp.fc.weight",)


def test_a_truncated_file(tmp_path: Path) -> None:
    small().write(tmp_path)
    with (tmp_path / HEAD_SHARD).open("r+b") as file:
        file.truncate(100)
    report = examine(open_checkpoint(tmp_path))
    assert codes(report)["file-unreadable"] == "error"


def fill(root: Path, value: Any, *, norms: float | None = None, seed: int = 0) -> None:
    """Write values into a head: a number, "normal" or "uniform"; norms may hold another number."""
    rng = np.random.default_rng(seed)
    listed = open_checkpoint(root)
    for key, info in listed.tensors.items():
        if not key.startswith("mtp."):
            continue
        count = info.nbytes // 2
        if norms is not None and "norm" in key:
            numbers = np.full(count, norms, np.float32)
        elif value == "normal":
            numbers = rng.standard_normal(count).astype(np.float32) * 0.02
        elif value == "uniform":
            numbers = rng.uniform(-0.05, 0.05, count).astype(np.float32)
        else:
            numbers = np.full(count, value, np.float32)
        write_values(root, key, numbers)


def write_values(root: Path, key: str, numbers: Any) -> None:
    """Store float32 numbers as a tensor's bfloat16."""
    info = open_checkpoint(root).tensors[key]
    with (root / info.file).open("r+b") as file:
        file.seek(info.start)
        file.write((numbers.view(np.uint32) >> 16).astype("<u2").tobytes())


def measured(root: Path) -> dict[str, str]:
    return codes(examine(open_checkpoint(root), values=lambda done, total: None))


def test_values_that_no_training_gives(tmp_path: Path) -> None:
    root = small().write(tmp_path)
    assert measured(root) == {"values-zero": "error"}
    fill(root, 0.5)
    assert measured(root) == {"values-constant": "error"}
    fill(root, float("nan"))
    assert measured(root) == {"values-nonfinite": "error"}
    fill(root, float("inf"))
    assert measured(root) == {"values-nonfinite": "error"}
    fill(root, "normal", norms=0.0)
    assert measured(root) == {"values-untrained": "warning"}
    fill(root, "normal", norms=0.25)
    assert measured(root) == {}
    fill(root, "uniform", norms=0.0)
    assert measured(root) == {"values-untrained": "warning"}, "nn.Linear starts uniform"
    fill(root, "uniform", norms=0.25)
    assert measured(root) == {}


@pytest.mark.parametrize(("family", "value"), [("qwen3_5", -1.0), ("llama", 0.0)])
def test_a_norm_that_multiplies_by_zero(family: str, value: float, tmp_path: Path) -> None:
    """Qwen's norms multiply by 1 + w, the others by w."""
    folder = small()
    if family == "llama":
        text = folder.config["text_config"]
        folder.config = {"model_type": "llama", "num_nextn_predict_layers": 1} | {
            k: v for k, v in text.items() if k != "model_type"
        }
        folder.head["mtp.layers.0.self_attn.q_proj.weight"] = ("BF16", (512, 256))
        folder.drop(lambda k: k.startswith("mtp.layers.0.self_attn.") and k.endswith("_norm.weight"))
    root = folder.write(tmp_path)
    fill(root, "normal", norms=0.5)
    assert "values-zero" not in measured(root)
    write_values(root, "mtp.norm.weight", np.full(256, value, np.float32))
    assert measured(root)["values-zero"] == "error"
    write_values(root, "mtp.norm.weight", np.full(256, -1.0 - value, np.float32))
    assert "values-zero" not in measured(root)


@pytest.mark.parametrize(("key", "rows"), [("gate_up_proj", (16, 32)), ("down_proj", (0, 64))])
def test_an_expert_of_zeros_in_a_stacked_tensor(key: str, rows: tuple[int, int], tmp_path: Path) -> None:
    root = checkpoint(qwen3_5_moe(64, 4, 16, 4), experts="grouped").write(tmp_path)
    fill(root, "normal", norms=0.25)
    assert measured(root) == {"experts-grouped": "info"}
    info = open_checkpoint(root).tensors[f"mtp.layers.0.mlp.experts.{key}"]
    values = np.random.default_rng(2).normal(size=info.shape).astype(np.float32)
    values[2, slice(*rows)] = 0
    write_values(root, info.key, values)
    report = examine(open_checkpoint(root), values=lambda done, total: None)
    assert tensors(report, "values-zero") == (info.key,)
    assert "(experts 2)" in report.findings[0].message


def test_values_that_are_stored_quantised_are_said_to_be_unchecked(tmp_path: Path) -> None:
    folder = small(quant_method="awq", bits=4, modules_to_not_convert=["mtp.fc"])
    module = "mtp.layers.0.mlp.down_proj"
    del folder.head[f"{module}.weight"]
    parts = {"qweight": ("I32", (512, 32)), "qzeros": ("I32", (4, 32)), "scales": ("F16", (4, 256))}
    folder.put({f"{module}.{part}": entry for part, entry in parts.items()})
    root = folder.write(tmp_path)
    fill(root, "normal", norms=0.25)
    report = examine(open_checkpoint(root), values=lambda done, total: None)
    assert tensors(report, "values-unchecked") == (f"{module}.qweight",)
    assert "1 of 15 head tensors" in next(f.message for f in report.findings if f.code == "values-unchecked")


def test_findings_are_ordered_by_severity_and_say_what_to_do(tmp_path: Path) -> None:
    folder = checkpoint(qwen3_5_moe(experts=4), experts="grouped")
    folder.drop(lambda k: k == "mtp.norm.weight")
    folder.head["mtp.fc.weight"] = ("F32", folder.head["mtp.fc.weight"][1])
    report = ask(folder, tmp_path)
    assert [f.severity for f in report.findings] == ["error", "warning", "info"]
    assert all(f.fix and f.message.endswith(".") for f in report.findings)
    json.dumps(report.as_json())


def test_a_head_alone_runs_beside_its_base(tmp_path: Path) -> None:
    folder = small()
    del folder.shards[TRUNK_SHARD]
    report = ask(folder, tmp_path)
    assert codes(report) == {"head-alone": "info"}
    assert report.facts.complete
    assert f"--speculative-draft-model-path {tmp_path}" in report.engines["sglang"].command
    assert f'"model":"{tmp_path}"' in report.engines["vllm"].command
    assert report.engines["nextn"].command.startswith(f"nextn generate BASE --head {tmp_path}")
    assert report.engines["transformers"].verdict == "unsupported"


def test_another_format_of_the_same_weights_is_no_lost_shard(tmp_path: Path) -> None:
    folder = small()
    folder.index = {k: f for f, found in folder.shards.items() for k in found}
    folder.put({"layers.0.attention.wq.weight": ("BF16", (8, 8))}, "consolidated.safetensors")
    assert codes(ask(folder, tmp_path)) == {}


def test_the_embedded_model_is_clean_down_to_its_values() -> None:
    report = examine(open_checkpoint(embedded_model()), values=lambda done, total: None)
    assert report.findings == ()
    assert report.facts.complete
    assert report.engines["nextn"].verdict == "works"
