"""What engines do with a head, by the rules read from their loaders: prefixes, counts, unknown keys, stale scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.families.registry import FAMILIES
from nextn.inspect.engines.supported import SUPPORT
from nextn.inspect.examine import Report, examine
from nextn.inspect.report import headline
from tests.families.published import PUBLISHED
from tests.fixtures import HEAD_SHARD, Folder, checkpoint, qwen3_5, qwen3_5_moe, qwen3_next
from tests.inspect import cases
from tests.inspect.asking import LINEARS, SMALL, ask, codes, small, tensors
from tests.inspect.test_families import folder_of
from tests.oracle.checkpoints import make_checkpoint


def verdicts(report: Report, *engines: str) -> tuple[str, ...]:
    return tuple(report.engines[e].verdict for e in engines)


def nested(folder: Folder, prefix: str = "model.language_model.") -> Folder:
    """The head's keys under a wrapper's prefix instead of ``model.``."""
    folder.shards[HEAD_SHARD] = {prefix + k.removeprefix("model."): v for k, v in folder.head.items()}
    return folder


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", "language_model."])
def test_a_qwen_head_under_a_prefix_is_passed_over(prefix: str, tmp_path: Path) -> None:
    report = ask(checkpoint(qwen3_5(**SMALL), prefix=prefix), tmp_path)
    assert codes(report) == {"head-prefix": "error"}
    assert report.facts.complete
    assert verdicts(report, "sglang", "vllm", "llamacpp", "tensorrt_llm") == ("degraded", "fails", "unknown", "unknown")
    assert report.engines["vllm"].error.startswith("ValueError: Following weights were not initialized from checkpoint")
    assert report.engines["nextn"].verdict == "works"
    message = report.findings[0].message
    assert f"{prefix}mtp." in message
    assert "published as mtp." in message
    assert codes(ask(checkpoint(qwen3_5(**SMALL)), tmp_path / "clean")) == {}


def test_a_glm_head_under_a_prefix_stops_vllm_and_is_passed_over_by_sglang(tmp_path: Path) -> None:
    report = ask(nested(folder_of(PUBLISHED["GLM-4.6"])), tmp_path)
    assert codes(report) == {"head-prefix": "error"}
    assert verdicts(report, "sglang", "vllm") == ("degraded", "fails")
    assert report.engines["vllm"].error.startswith("KeyError: 'model.language_model.layers.92.")


def test_prefixes_that_the_engines_read_are_no_defect(tmp_path: Path) -> None:
    ocr = next(n for n, case in PUBLISHED.items() if case.family == "glm_ocr")
    report = ask(nested(folder_of(PUBLISHED[ocr])), tmp_path)
    assert codes(report) == {}
    assert verdicts(report, "sglang", "vllm") == ("works", "works")


def test_every_family_with_prefixes_has_an_answer_where_sources_were_read() -> None:
    for family in FAMILIES:
        if len(family.prefixes) == 1:
            continue
        kinds = {*family.architectures, *family.model_types}
        for engine in ("sglang", "vllm"):
            for support in SUPPORT[engine]:
                if kinds & set(support.kinds):
                    assert support.prefixes is not None, (engine, family.name)
                    assert set(support.prefixes) <= set(family.prefixes)
                    assert set(support.stops_at) <= set(family.prefixes) - set(support.prefixes)


def quark_glob() -> Folder:
    return small(quant_method="quark", exclude=["lm_head", "mtp.*"])


def next_nvfp4() -> Folder:
    folder = checkpoint(qwen3_next(4))
    folder.extra["hf_quant_config.json"] = cases.modelopt(["mtp*"])
    return folder


def next_gptq() -> Folder:
    folder = checkpoint(qwen3_next(4))
    folder.config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mtp.*": {}}}
    return folder


@pytest.mark.parametrize("build", [quark_glob, next_nvfp4, next_gptq])
def test_no_engine_fails_beside_a_green_report(build: Callable[[], Folder], tmp_path: Path) -> None:
    report = ask(build(), tmp_path)
    failing = [n for n, v in report.engines.items() if v.verdict == "fails"]
    assert failing
    assert codes(report)["quant-runtime-name"] == "error"
    assert "Nothing to fix" not in headline(report)[0]


def test_the_headline_names_engines_that_run_only_a_part(tmp_path: Path) -> None:
    assert headline(ask(small(), tmp_path / "clean"))[0].endswith("Nothing to fix.")
    sentence, colour = headline(ask(folder_of(PUBLISHED["MiMo-V2-Flash"]), tmp_path / "three"))
    assert sentence.endswith("Nothing to fix, but not every engine runs it whole: see vLLM.")
    assert colour == "yellow"


def stale(listed: list[str]) -> Folder:
    folder = small(quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=listed)
    folder.put({"mtp.layers.0.mlp.down_proj.weight_scale_inv": ("F32", (2, 4))})
    return folder


def test_a_stale_scale_is_loaded_where_the_module_is_built_quantised(tmp_path: Path) -> None:
    report = ask(stale(["mtp.fc"]), tmp_path)
    assert codes(report) == {"quant-unlisted": "error", "scales-stale": "error"}
    assert verdicts(report, "sglang", "vllm") == ("degraded", "degraded")
    assert all("stale scale is applied" in " ".join(report.engines[e].notes) for e in ("sglang", "vllm"))
    assert verdicts(report, "llamacpp", "tensorrt_llm") == ("unknown", "unknown")


def test_a_stale_scale_has_no_place_where_the_module_is_built_plain(tmp_path: Path) -> None:
    report = ask(stale(LINEARS), tmp_path)
    assert codes(report) == {"scales-stale": "error"}
    assert verdicts(report, "sglang", "vllm") == ("works", "fails")
    error = report.engines["vllm"].error
    assert "There is no module or parameter named 'layers.0.mlp.down_proj.weight_scale_inv'" in error


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_sglang_takes_one_declared_layer_of_deepseek_and_no_more(version: str, tmp_path: Path) -> None:
    folder = folder_of(PUBLISHED["DeepSeek-V3"])
    clean = ask(folder, tmp_path / "clean", sglang=version)
    assert clean.engines["sglang"].verdict == "works"
    folder.config["num_nextn_predict_layers"] = 2
    report = ask(folder, tmp_path / "two", sglang=version)
    assert codes(report)["count-mismatch"] == "error"
    assert report.engines["sglang"].verdict == "fails"
    assert report.engines["sglang"].error == "AssertionError: Only 1 nextn layer is supported"
    assert all(k.startswith("model.layers.62.") for k in tensors(report, "count-mismatch"))
    assert len(tensors(report, "count-mismatch")) == len(report.facts.expected)
    assert report.facts.complete, "one layer is all that is used"


def test_chained_heads_are_incomplete_without_their_last_layer(tmp_path: Path) -> None:
    folder = folder_of(PUBLISHED["Step-3.5-Flash"])
    assert ask(folder, tmp_path / "clean").facts.complete
    folder.drop(lambda k: k.startswith("model.layers.47."))
    report = ask(folder, tmp_path / "two")
    assert not report.facts.complete
    assert codes(report) == {"count-mismatch": "error"}
    assert {k.split(".")[2] for k in tensors(report, "count-mismatch")} == {"47"}
    assert report.engines["sglang"].verdict == "fails"


@pytest.mark.parametrize(
    ("config", "sglang", "vllm"),
    [
        (qwen3_5(**SMALL), "works", "There is no module or parameter named 'layers.0.mlp.foo.weight'"),
        (qwen3_next(4), "KeyError: 'model.layers.0.mlp.foo.weight'", "'layers.0.mlp.foo.weight'"),
    ],
)
def test_an_unknown_tensor(config: dict[str, object], sglang: str, vllm: str, tmp_path: Path) -> None:
    folder = checkpoint(config)
    assert codes(ask(folder, tmp_path / "clean")) == {}
    folder.put({"mtp.layers.0.mlp.foo.weight": ("BF16", (8, 8))})
    report = ask(folder, tmp_path / "odd")
    assert codes(report) == {"tensors-unexpected": "error"}
    told = report.engines["sglang"]
    assert sglang in (told.verdict, told.error)
    assert vllm in report.engines["vllm"].error
    assert verdicts(report, "tensorrt_llm", "nextn") == ("unknown", "fails")


def test_a_layer_that_the_config_does_not_declare_stops_vllm(tmp_path: Path) -> None:
    report = ask(checkpoint(qwen3_5(**SMALL, mtp=1), layers=2), tmp_path)
    assert report.engines["vllm"].verdict == "fails"
    assert "'layers.1." in report.engines["vllm"].error
    assert codes(report)["count-mismatch"] == "error"


def test_nothing_is_said_of_tensorrt_llm_that_no_source_says(tmp_path: Path) -> None:
    half = small()
    half.drop(lambda k: k == "mtp.fc.weight")
    fp8 = small()
    fp8.head["mtp.fc.weight"] = ("F8_E4M3", fp8.head["mtp.fc.weight"][1])
    outside = small()
    outside.index = {k: f for f, found in outside.shards.items() if f != HEAD_SHARD for k in found}
    wrong = small()
    wrong.put({"mtp.fc.weight": ("BF16", (16, 16))})
    undeclared = cases.report_02(True)
    for at, folder in enumerate([cases.report_01(True), half, fp8, outside, wrong, undeclared, cases.report_14(True)]):
        report = ask(folder, tmp_path / str(at))
        assert report.engines["tensorrt_llm"].verdict == "unknown", at
        assert report.engines["tensorrt_llm"].notes, at
    assert ask(small(), tmp_path / "clean").engines["tensorrt_llm"].verdict == "works"


def test_an_undeclared_fp8_head_is_unknown_to_llama_cpp(tmp_path: Path) -> None:
    folder = small()
    folder.head["mtp.fc.weight"] = ("F8_E4M3", folder.head["mtp.fc.weight"][1])
    assert ask(folder, tmp_path).engines["llamacpp"].verdict == "unknown"


@pytest.mark.parametrize("broken", ["truncated", "a link to nowhere"])
def test_a_damaged_file_is_not_a_lost_head(broken: str, tmp_path: Path) -> None:
    root = small().write(tmp_path)
    assert codes(examine(open_checkpoint(root))) == {}
    shard = root / HEAD_SHARD
    if broken == "truncated":
        shard.write_bytes(shard.read_bytes()[:100])
    else:
        shard.unlink()
        shard.symlink_to(root / "nowhere")
    report = examine(open_checkpoint(root))
    assert codes(report) == {"file-unreadable": "error"}
    assert len(tensors(report, "file-unreadable")) == 15
    assert headline(report)[0] == "Qwen3.5 dense: the head's files are missing or damaged."
    message = report.findings[0].message
    assert message.count(HEAD_SHARD) == 1
    assert report.findings[0].command == f"hf download REPO {HEAD_SHARD} --local-dir {root}"


def test_a_folder_without_weights_is_not_a_lost_head(tmp_path: Path) -> None:
    (small().write(tmp_path / "model") / HEAD_SHARD).unlink()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    report = examine(open_checkpoint(tmp_path / "bare"))
    assert codes(report) == {"weights-missing": "error"}
    assert headline(report)[0] == "Qwen3.5 dense: there are no weights."
    assert verdicts(report, "sglang", "vllm", "nextn") == ("fails", "fails", "fails")


def test_experts_in_both_storages(tmp_path: Path) -> None:
    config = qwen3_5_moe(64, 4, 16, 4)
    folder = checkpoint(config)
    split = [k for k in folder.head if ".experts." in k]
    folder.head.update(checkpoint(config, experts="grouped").head)
    report = ask(folder, tmp_path)
    assert codes(report) == {"experts-doubled": "warning", "experts-grouped": "info"}
    assert set(tensors(report, "experts-doubled")) == set(split)
    assert verdicts(report, "sglang", "vllm") == ("unknown", "unknown")


def test_known_bad_versions_have_a_reason_that_is_a_finding(tmp_path: Path) -> None:
    root = small().write(tmp_path)
    report = examine(open_checkpoint(root), {"llamacpp": "b10742"})
    assert report.engines["llamacpp"].reasons == ("engine-version",)
    assert codes(report) == {"engine-version": "error"}
    old = examine(open_checkpoint(root), {"sglang": "0.5.15"})
    assert codes(old) == {}
    command = old.engines["sglang"].command
    assert command.endswith("--mamba-scheduler-strategy no_buffer --page-size 1 --disable-overlap-schedule")


def test_reasons_are_findings_and_failures_are_errors(tmp_path: Path) -> None:
    folders = [getattr(cases, n)(True) for n in dir(cases) if n.startswith("report_")]
    folders += [quark_glob(), next_nvfp4(), next_gptq(), stale(["mtp.fc"]), stale(LINEARS)]
    folders += [folder_of(case) for case in PUBLISHED.values()]
    for at, folder in enumerate(folders):
        report = ask(folder, tmp_path / str(at))
        found = codes(report)
        for name, verdict in report.engines.items():
            assert set(verdict.reasons) <= set(found), (at, name)
            assert set(verdict.fatal) <= set(verdict.reasons)
            if verdict.verdict == "fails":
                assert verdict.error
                assert "error" in found.values(), (at, name)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding-window"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_nextn_says_of_itself_what_its_engine_says(tmp_path: Path, change: dict[str, object], what: str) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    clean = examine(open_checkpoint(str(folder))).as_json()["engines"]["nextn"]
    assert clean["verdict"] == "works"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    verdict = examine(open_checkpoint(str(folder))).as_json()["engines"]["nextn"]
    assert verdict["verdict"] == "unsupported"
    assert what in verdict["notes"][0]
