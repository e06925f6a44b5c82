"""Heads in GGUF files: found, whole, counted, and the fusion not squeezed too far."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.examine import Report, examine
from nextn.inspect.report import headline

HIDDEN, INTER, HEADS, KV, WIDTH = 256, 512, 2, 1, 256
BLOCK: dict[str, tuple[int, ...]] = {
    "nextn.eh_proj": (HIDDEN, 2 * HIDDEN),
    "nextn.enorm": (HIDDEN,),
    "nextn.hnorm": (HIDDEN,),
    "nextn.shared_head_norm": (HIDDEN,),
    "attn_norm": (HIDDEN,),
    "post_attention_norm": (HIDDEN,),
    "attn_q": (2 * HEADS * WIDTH, HIDDEN),
    "attn_k": (KV * WIDTH, HIDDEN),
    "attn_v": (KV * WIDTH, HIDDEN),
    "attn_output": (HIDDEN, HEADS * WIDTH),
    "attn_q_norm": (WIDTH,),
    "attn_k_norm": (WIDTH,),
    "ffn_gate": (INTER, HIDDEN),
    "ffn_up": (INTER, HIDDEN),
    "ffn_down": (HIDDEN, INTER),
}


def write(
    path: Path,
    *,
    arch: str = "qwen35",
    declared: int | None = 1,
    blocks: int = 5,
    leave_out: tuple[str, ...] = (),
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    more: dict[str, tuple[int, ...]] | None = None,
) -> Path:
    """A GGUF with four target blocks and one head block, which holds `more` tensors too."""
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(blocks)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_key_length(WIDTH)
    writer.add_value_length(WIDTH)
    if declared is not None:
        writer.add_uint32(f"{arch}.nextn_predict_layers", declared)
    writer.add_tensor("token_embd.weight", np.zeros((1000, HIDDEN), np.float16))
    writer.add_tensor("output_norm.weight", np.zeros(HIDDEN, np.float32))
    for number in range(4):
        writer.add_tensor(f"blk.{number}.attn_norm.weight", np.zeros(HIDDEN, np.float32))
    if more:
        writer.add_expert_count(4)
        writer.add_expert_feed_forward_length(INTER)
        writer.add_expert_shared_feed_forward_length(INTER)
    for name, shape in (BLOCK | (more or {})).items():
        if name in leave_out:
            continue
        kind = (kinds or {}).get(name)
        values = np.zeros(shape, np.float32 if len(shape) == 1 or kind else np.float16)
        if kind:
            writer.add_tensor(f"blk.4.{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"blk.4.{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ask(path: Path, **versions: str) -> Report:
    return examine(open_checkpoint(path), versions)


def codes(report: Report) -> dict[str, str]:
    return {f.code: f.severity for f in report.findings}


def test_a_whole_head_is_clean(tmp_path: Path) -> None:
    report = ask(write(tmp_path / "m.gguf"))
    assert codes(report) == {}
    got = report.as_json()
    assert got["family"] == "qwen3_5"
    assert got["architectures"] == ["qwen35"]
    assert (got["declared_layers"], got["declared_by"]) == (1, "qwen35.nextn_predict_layers")
    assert got["heads_found"] == 1
    assert got["complete"] is True
    assert got["tensors"]["expected"] == got["tensors"]["found"] == 15
    assert got["dtypes"] == {"F16": 8, "F32": 7}
    assert got["engines"]["llamacpp"]["verdict"] == "works"
    assert got["engines"]["llamacpp"]["command"].startswith("llama-server -m ")
    assert got["engines"]["sglang"]["verdict"] == "unsupported"


def test_a_head_that_the_metadata_promises_and_the_file_lacks(tmp_path: Path) -> None:
    report = ask(write(tmp_path / "m.gguf", leave_out=tuple(BLOCK)))
    assert codes(report) == {"head-missing": "error"}
    assert "blk.4.nextn.eh_proj.weight" in report.findings[0].tensors
    assert report.engines["llamacpp"].verdict == "fails"
    assert "missing tensor" in report.engines["llamacpp"].error


@pytest.mark.parametrize("name", ["nextn.hnorm", "attn_k", "ffn_down"])
def test_a_head_that_lacks_a_tensor(name: str, tmp_path: Path) -> None:
    report = ask(write(tmp_path / "m.gguf", leave_out=(name,)))
    assert codes(report) == {"head-partial": "error"}
    assert report.facts.missing == (f"blk.4.{name}.weight",)


def test_a_head_that_the_metadata_denies(tmp_path: Path) -> None:
    report = ask(write(tmp_path / "m.gguf", declared=None))
    assert codes(report) == {"head-undeclared": "error"}
    assert report.facts.complete
    assert report.engines["llamacpp"].verdict == "fails"


def test_a_plain_model_has_no_head_and_needs_none(tmp_path: Path) -> None:
    report = ask(write(tmp_path / "m.gguf", declared=None, blocks=4, leave_out=tuple(BLOCK)))
    assert codes(report) == {"no-head": "info"}


@pytest.mark.parametrize(
    ("kind", "warned"),
    [("Q8_0", False), ("Q4_0", True), ("Q5_0", False)],
)
def test_a_fusion_of_few_bits_costs_acceptance(kind: str, warned: bool, tmp_path: Path) -> None:
    kinds = {"nextn.eh_proj": gguf.GGMLQuantizationType[kind], "ffn_up": gguf.GGMLQuantizationType["Q4_0"]}
    report = ask(write(tmp_path / "m.gguf", kinds=kinds))
    assert codes(report) == {"head-quantised": "info"} | ({"fusion-overquantised": "warning"} if warned else {})
    assert report.case.claims.stored == "mixed"
    assert report.as_json()["quantization"]["method"] == "gguf"


def test_versions_that_crash_on_any_head(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    assert ask(path, llamacpp="b10742").engines["llamacpp"].verdict == "fails"
    assert ask(path, llamacpp="b9000").engines["llamacpp"].verdict == "unsupported"


def test_an_architecture_of_which_only_the_fusion_is_known(tmp_path: Path) -> None:
    report = ask(write(tmp_path / "m.gguf", arch="nemotron_h"))
    assert report.as_json()["family"] == "nemotron_h"
    assert codes(report) == {}
    assert len(report.facts.expected) == 4
    report = ask(write(tmp_path / "n.gguf", arch="nemotron_h", leave_out=("nextn.enorm",)))
    assert codes(report) == {"layout-unsure": "info"}


def test_a_split_one_without_its_first_piece_says_so(tmp_path: Path) -> None:
    """The metadata is in the first piece, so that the others name no model."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35")
    writer.kv_data[0].clear()
    writer.add_tensor("blk.4.nextn.hnorm.weight", np.zeros(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = (tmp_path / "m.gguf").rename(tmp_path / "m-00002-of-00002.gguf")
    report = ask(path)
    assert codes(report) == {"shard-missing": "error", "family-unknown": "warning"}
    assert "m-00001-of-00002.gguf" in report.findings[1].message
    assert report.findings[1].fix == "Put m-00001-of-00002.gguf beside it."
    assert headline(report)[0].startswith("The first piece of this GGUF")


def test_only_a_fusion_that_is_quantised_makes_the_head_mixed(tmp_path: Path) -> None:
    report = ask(write(tmp_path / "m.gguf", kinds={"nextn.eh_proj": gguf.GGMLQuantizationType.Q4_0}))
    assert report.case.claims.stored == "mixed"
    assert codes(report) == {"fusion-overquantised": "warning"}
    assert ask(write(tmp_path / "n.gguf")).case.claims.stored == "none"


def test_a_gate_of_the_shared_expert_in_float32_is_no_mixture(tmp_path: Path) -> None:
    """llama.cpp stores ``ffn_gate_inp_shexp`` as F32 beside matrices of another type."""
    experts = {
        "ffn_gate_inp": (4, HIDDEN),
        "ffn_gate_exps": (4, INTER, HIDDEN),
        "ffn_up_exps": (4, INTER, HIDDEN),
        "ffn_down_exps": (4, HIDDEN, INTER),
        "ffn_gate_shexp": (INTER, HIDDEN),
        "ffn_up_shexp": (INTER, HIDDEN),
        "ffn_down_shexp": (HIDDEN, INTER),
        "ffn_gate_inp_shexp": (HIDDEN,),
    }
    report = ask(
        write(tmp_path / "m.gguf", arch="qwen35moe", leave_out=("ffn_gate", "ffn_up", "ffn_down"), more=experts)
    )
    assert codes(report) == {}
    assert report.facts.found == len(report.facts.expected) == 20
    gate = report.facts.head["mtp.0.block.moe.shared_gate.weight"].weight
    assert (gate.dtype, report.facts.head["mtp.0.fuse.weight"].weight.dtype) == ("F32", "F16")


@pytest.mark.parametrize(("named", "first"), [("m-00002-of-00002.gguf", "m-00001-of-00002.gguf"), ("m.gguf", "m.gguf")])
def test_llama_cpp_is_given_the_first_piece(named: str, first: str, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole" / "m.gguf")
    (tmp_path / "pieces").mkdir()
    for name in {named, first}:
        (tmp_path / "pieces" / name).write_bytes(whole.read_bytes())
    report = ask(tmp_path / "pieces" / named)
    assert report.engines["llamacpp"].command.startswith(f"llama-server -m {tmp_path / 'pieces' / first} ")
    if named == first:
        folder = ask(tmp_path / "pieces")
        assert folder.engines["llamacpp"].command == report.engines["llamacpp"].command


def test_a_gguf_on_a_hub_is_named_by_repository_and_file(tmp_path: Path) -> None:
    listed = open_checkpoint(write(tmp_path / "m.gguf"))
    listed.source, listed.root = "org/model/m.gguf", None
    command = examine(listed).engines["llamacpp"].command
    assert command.startswith("llama-server --hf-repo org/model --hf-file m.gguf --spec-type draft-mtp ")


def test_fixes_of_a_gguf_name_no_config_and_no_merge(tmp_path: Path) -> None:
    for at, report in enumerate(
        [
            ask(write(tmp_path / "absent.gguf", declared=None)),
            ask(write(tmp_path / "zero.gguf", declared=0)),
            ask(write(tmp_path / "lost.gguf", leave_out=tuple(BLOCK))),
            ask(write(tmp_path / "part.gguf", leave_out=("attn_k",))),
        ]
    ):
        finding = report.findings[0]
        assert "merge" not in finding.command, at
        assert finding.command.startswith(("python convert_hf_to_gguf.py ", "gguf-set-metadata ")), at
    zero = ask(tmp_path / "zero.gguf").findings[0]
    assert zero.command == f"gguf-set-metadata {tmp_path / 'zero.gguf'} qwen35.nextn_predict_layers 1"


def test_an_unknown_architecture_with_a_head(tmp_path: Path) -> None:
    report = ask(write(tmp_path / "m.gguf", arch="brandnew"))
    assert codes(report) == {"family-unknown": "warning"}
