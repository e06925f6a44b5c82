"""The field reports 1 to 17, each with its exact answer and a clean control beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.diff import diff
from nextn.inspect.examine import Report
from nextn.inspect.facts import gather
from tests.fixtures import HEAD_SHARD, Folder, checkpoint, qwen3_5
from tests.inspect import cases
from tests.inspect.asking import ask, codes
from tests.inspect.asking import tensors as listed
from tests.inspect.cases import ATTENTION, MLP

HEAD_KEYS = {
    *(f"{m}.weight" for m in [*ATTENTION, *MLP]),
    *(f"mtp.{n}.weight" for n in ("fc", "norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")),
    *(f"mtp.layers.0.{n}_layernorm.weight" for n in ("input", "post_attention")),
    *(f"mtp.layers.0.self_attn.{n}_norm.weight" for n in "qk"),
}


def tensors(report: Report, code: str) -> set[str]:
    return set(listed(report, code))


def verdicts(report: Report) -> dict[str, str]:
    return {name: v.verdict for name, v in report.engines.items()}


CLEAN: list[tuple[Callable[..., Folder], dict[str, str]]] = [
    (cases.report_01, {}),
    (cases.report_02, {}),
    (cases.report_03, {}),
    (cases.report_04, {}),
    (cases.report_05, {}),
    (cases.report_08, {}),
    (cases.report_09, {}),
    (cases.report_10, {}),
    (cases.report_11, {}),
    (cases.report_12, {}),
    (cases.report_13, {}),
    (cases.report_14, {}),
    (cases.report_16, {}),
    (cases.report_17, {}),
]


@pytest.mark.parametrize(("build", "expected"), CLEAN, ids=lambda v: getattr(v, "__name__", ""))
def test_the_control_beside_each_report_is_clean(
    build: Callable[..., Folder], expected: dict[str, str], tmp_path: Path
) -> None:
    report = ask(build(False), tmp_path)
    assert codes(report) == expected
    assert report.facts.complete
    assert report.facts.missing == ()
    assert report.engines["vllm"].verdict == "works"


def test_01_a_head_lost_by_saving_through_transformers(tmp_path: Path) -> None:
    report = ask(cases.report_01(True), tmp_path)
    assert codes(report) == {"head-missing": "error"}
    assert tensors(report, "head-missing") == HEAD_KEYS
    assert not report.facts.complete
    assert verdicts(report) == {
        "sglang": "degraded",
        "vllm": "fails",
        "transformers": "unsupported",
        "llamacpp": "fails",
        "tensorrt_llm": "unknown",
        "nextn": "fails",
    }
    message = report.findings[0].message
    assert "mtp.pre_fc_norm_embedding.weight" in message
    assert "model.pre_fc_norm_embedding.weight" in message
    assert report.findings[0].command == f"nextn merge {tmp_path} BASE OUT"
    assert report.findings[0].fix.endswith(f": nextn merge {tmp_path} BASE OUT")
    assert "were not initialized from checkpoint" in report.engines["vllm"].error


def test_02_a_head_that_the_config_denies(tmp_path: Path) -> None:
    report = ask(cases.report_02(True), tmp_path)
    assert codes(report) == {"head-undeclared": "error"}
    assert report.facts.complete
    assert "text_config.mtp_num_hidden_layers to 1" in report.findings[0].fix
    assert verdicts(report) | {"nextn": ""} == {
        "sglang": "works",
        "vllm": "fails",
        "transformers": "unsupported",
        "llamacpp": "fails",
        "tensorrt_llm": "unknown",
        "nextn": "",
    }


def test_02_the_same_where_the_field_was_deleted(tmp_path: Path) -> None:
    report = ask(cases.report_02(True, deleted=True), tmp_path)
    assert set(codes(report)) == {"head-undeclared"}
    assert report.facts.declared is None
    assert report.facts.complete
    assert report.engines["sglang"].verdict == "works"
    assert report.engines["vllm"].verdict == "works"
    assert report.engines["llamacpp"].verdict == "fails", "the converter takes an absent count as 0"
    assert "Can not map tensor 'model.layers.24.eh_proj.weight'" in report.engines["llamacpp"].error


def test_03_a_family_that_declares_nothing_is_known_to_ship_a_head(tmp_path: Path) -> None:
    report = ask(cases.report_03(True), tmp_path)
    assert codes(report) == {"head-missing": "error"}
    assert report.facts.declared is None
    assert len(tensors(report, "head-missing")) == 41
    assert "declares no count" in report.findings[0].message


def test_04_another_exporters_prefix_hides_nothing(tmp_path: Path) -> None:
    plain = gather(open_checkpoint(cases.report_04(False).write(tmp_path / "plain")))
    report = ask(cases.report_04(True), tmp_path / "nested")
    assert codes(report) == {"head-prefix": "error"}
    assert report.facts.complete
    assert report.facts.prefix == "model.language_model."
    assert set(report.facts.head) == set(plain.head)
    assert report.facts.missing == ()


def test_05_a_quantised_folder_without_a_head(tmp_path: Path) -> None:
    report = ask(cases.report_05(True), tmp_path)
    assert codes(report) == {"head-missing": "error"}
    assert report.engines["vllm"].verdict == "degraded", "a quantised checkpoint is not checked for completeness"


def test_05_a_head_grafted_into_it_that_no_rule_exempts(tmp_path: Path) -> None:
    report = ask(cases.report_05(True, grafted=True), tmp_path)
    assert codes(report) == {"quant-unlisted": "error"}
    assert tensors(report, "quant-unlisted") == {f"{m}.weight" for m in ["mtp.fc", *ATTENTION, *MLP]}
    assert verdicts(report)["vllm"] == "fails"
    assert verdicts(report)["sglang"] == "degraded"
    assert "extra_config" in report.findings[0].fix


def test_06_a_trained_head_that_is_the_bases_byte_for_byte(tmp_path: Path) -> None:
    base = checkpoint(qwen3_5(256, 512, 4, 2, 1)).write(tmp_path / "base")
    same = checkpoint(qwen3_5(256, 512, 4, 2, 1)).write(tmp_path / "same")
    trained = checkpoint(qwen3_5(256, 512, 4, 2, 1)).write(tmp_path / "trained")
    shard = open_checkpoint(trained).tensors["mtp.fc.weight"]
    with (trained / HEAD_SHARD).open("r+b") as file:
        file.seek(shard.start)
        file.write(b"\x80\x3f")
    facts = [gather(open_checkpoint(p)) for p in (base, same, trained)]
    assert diff(facts[0], facts[1]).identical
    changed = diff(facts[0], facts[2])
    assert not changed.identical
    assert [c.name for c in changed.changed] == ["mtp.0.fuse.weight"]
    assert len(changed.equal) == 14


def test_08_an_exclude_list_that_forgets_the_fusion(tmp_path: Path) -> None:
    report = ask(cases.report_08(True), tmp_path)
    assert codes(report) == {"quant-unlisted": "error"}
    assert tensors(report, "quant-unlisted") == {"mtp.fc.weight"}
    assert report.facts.head["mtp.0.fuse.weight"].weight.shape == (2048, 4096)
    assert verdicts(report)["sglang"] == verdicts(report)["vllm"] == "works"
    assert verdicts(report)["nextn"] == "unsupported"


def test_09_projections_listed_before_fusion(tmp_path: Path) -> None:
    report = ask(cases.report_09(True), tmp_path)
    assert codes(report) == {"quant-listed-unfused": "warning"}
    assert tensors(report, "quant-listed-unfused") == {f"{m}.weight" for m in (*ATTENTION[:3], *MLP[:2])}
    assert verdicts(report)["sglang"] == verdicts(report)["vllm"] == "works"
    old = ask(cases.report_09(True), tmp_path, sglang="0.5.17")
    assert old.engines["sglang"].verdict == "degraded"
    assert old.engines["sglang"].reasons == ("quant-listed-unfused",)
    assert "accept length 1.0" in " ".join(old.engines["sglang"].notes)


def test_10_experts_that_the_list_forgets(tmp_path: Path) -> None:
    report = ask(cases.report_10(True), tmp_path)
    assert codes(report) == {"quant-unlisted": "error"}
    experts = {f"mtp.layers.0.mlp.experts.{e}.{p}_proj.weight" for e in range(8) for p in ("gate", "up", "down")}
    assert tensors(report, "quant-unlisted") == experts
    assert report.engines["vllm"].verdict == "fails"
    assert report.engines["vllm"].error == "KeyError: 'layers.0.mlp.experts.w2_weight'"


def test_11_a_gptq_target_without_a_dynamic_rule(tmp_path: Path) -> None:
    report = ask(cases.report_11(True), tmp_path)
    assert codes(report) == {"quant-unlisted": "error"}
    assert tensors(report, "quant-unlisted") == {f"{m}.weight" for m in ["mtp.fc", *ATTENTION, *MLP]}
    assert '"dynamic": {"-:.*mtp.*": {}}' in report.findings[0].fix
    assert verdicts(report)["vllm"] == "fails"


def test_12_excludes_that_name_nothing_of_the_head(tmp_path: Path) -> None:
    report = ask(cases.report_12(True), tmp_path)
    assert codes(report) == {"quant-unlisted": "error"}
    assert len(tensors(report, "quant-unlisted")) == 1 + 4 + 3 + 3 * 4
    assert report.case.claims.stored == "none"


def test_12_a_head_stored_in_two_ways_is_judged_a_tensor_at_a_time(tmp_path: Path) -> None:
    clean = ask(cases.report_12(False, mixed=True), tmp_path / "clean")
    assert codes(clean) == {"head-quantised": "info"}
    assert clean.case.claims.stored == "mixed"
    assert clean.facts.complete
    assert verdicts(clean)["sglang"] == "works"
    old = ask(cases.report_12(False, mixed=True), tmp_path / "clean", sglang="0.5.17")
    assert old.engines["sglang"].reasons == ("head-quantised",), "0.5.17 built the whole head in bf16"
    broken = ask(cases.report_12(True, mixed=True), tmp_path / "broken")
    assert codes(broken) == {"quant-unlisted": "error", "head-quantised": "info"}
    assert tensors(broken, "quant-unlisted") == {"mtp.fc.weight"}


def test_13_scales_left_over_from_a_quantised_head(tmp_path: Path) -> None:
    report = ask(cases.report_13(True), tmp_path)
    assert codes(report) == {"scales-stale": "error"}
    assert tensors(report, "scales-stale") == {"mtp.layers.0.self_attn.q_proj.weight_scale_inv"}
    assert report.facts.complete
    assert report.engines["vllm"].verdict == "fails"


def test_14_stacked_experts_are_no_defect(tmp_path: Path) -> None:
    report = ask(cases.report_14(True), tmp_path)
    assert codes(report) == {"experts-grouped": "info"}
    assert len(report.facts.expected) == report.facts.found == 19
    assert len(ask(cases.report_14(False), tmp_path / "split").facts.expected) == 785
    assert verdicts(report)["sglang"] == verdicts(report)["vllm"] == "works"
    assert ask(cases.report_14(True), tmp_path, vllm="0.26.0").engines["vllm"].reasons == ("experts-grouped",)


def test_16_a_head_in_a_shard_that_the_index_omits(tmp_path: Path) -> None:
    report = ask(cases.report_16(True), tmp_path)
    assert codes(report) == {"shard-unindexed": "error"}
    assert report.facts.complete, "headers, not the index, say what is there"
    assert tensors(report, "shard-unindexed") == HEAD_KEYS
    assert report.engines["vllm"].verdict == "fails"
    assert report.engines["sglang"].verdict == "degraded"


def test_17_a_head_made_for_another_size(tmp_path: Path) -> None:
    report = ask(cases.report_17(True), tmp_path)
    assert codes(report) == {"shape-mismatch": "error"}
    assert tensors(report, "shape-mismatch") == {"mtp.fc.weight"}
    message = report.findings[0].message
    assert "[2048, 4096]" in message
    assert "[2560, 5120]" in message
    assert {e: v for e, v in verdicts(report).items() if e in ("sglang", "vllm", "nextn")} == dict.fromkeys(
        ("sglang", "vllm", "nextn"), "fails"
    )
