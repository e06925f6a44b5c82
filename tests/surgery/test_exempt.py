"""The exemptions that merge writes are seen by each engine's own way of matching, in every scheme."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from nextn.inspect.examine import examine
from nextn.surgery.exempt import exempt
from nextn.surgery.merge import MergeOptions, plan_merge
from nextn.surgery.names import HeadNames
from nextn.surgery.write import write as carry_out
from tests.fixtures import checkpoint
from tests.surgery import schemes
from tests.surgery.builder import headless, tiny_qwen3_5, tiny_qwen3_5_moe, write


def _merged(tmp_path: Path, scheme: str, moe: bool, experts: str = "split") -> tuple[Path, dict[str, Any], Any]:
    config = tiny_qwen3_5_moe() if moe else tiny_qwen3_5()
    write(checkpoint(config, experts=experts), tmp_path / "head", 1)
    folder = headless(config)
    declared, beside = schemes.declarations()[scheme]
    if declared is not None:
        folder.config["quantization_config"] = declared
    if beside is not None:
        folder.extra["hf_quant_config.json"] = beside
    write(folder, tmp_path / "base", 2)
    out = tmp_path / "out"
    base, head = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "head")
    carry_out(plan_merge(base, head, out, MergeOptions(experts=experts)))
    config = json.loads((out / "config.json").read_text())
    path = out / "hf_quant_config.json"
    return out, config, json.loads(path.read_text()) if path.exists() else None


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("scheme", schemes.declarations())
def test_every_engine_leaves_every_module_of_the_head_alone(tmp_path: Path, scheme: str, moe: bool) -> None:
    _, config, beside = _merged(tmp_path, scheme, moe)
    for module in schemes.runtime_modules(moe):
        answers = schemes.exempted(scheme, config, beside, module)
        assert set(answers.values()) == {True}, (module, answers)


@pytest.mark.parametrize("scheme", schemes.declarations())
def test_no_module_of_the_target_is_exempted_on_the_way(tmp_path: Path, scheme: str) -> None:
    _, config, beside = _merged(tmp_path, scheme, True)
    for module in ("model.layers.0.self_attn.qkv_proj", "model.layers.2.mlp.experts", "model.layers.0.mlp.gate"):
        if scheme == "gptq-bare" or scheme.startswith("gptq"):
            rules = [r for r in config["quantization_config"]["dynamic"] if "visual" not in r]
            assert len(rules) == 1
            answers = {"both": schemes.exempted(scheme, config, beside, module)["both"]}
        else:
            answers = schemes.exempted(scheme, config, beside, module)
        assert not any(answers.values()), (module, answers)


@pytest.mark.parametrize("scheme", schemes.declarations())
def test_what_the_lists_said_before_stays_and_a_second_merge_adds_nothing(tmp_path: Path, scheme: str) -> None:
    out, config, beside = _merged(tmp_path, scheme, False)
    before, beside_before = schemes.declarations()[scheme]
    for old, new in ((before, config.get("quantization_config")), (beside_before, beside)):
        for field, value in (old or {}).items():
            if isinstance(value, list):
                assert new[field][: len(value)] == value
            elif not isinstance(value, dict) and value is not None:
                assert new[field] == value
    again = tmp_path / "again"
    head = open_checkpoint(tmp_path / "head")
    carry_out(plan_merge(open_checkpoint(out), head, again, MergeOptions(replace=True)))
    assert json.loads((again / "config.json").read_text()) == config
    if beside is not None:
        assert json.loads((again / "hf_quant_config.json").read_text()) == beside


def test_an_empty_awq_list_is_filled_with_what_the_files_show(tmp_path: Path) -> None:
    _, config, _ = _merged(tmp_path, "awq-bare", False)
    listed = config["quantization_config"]["modules_to_not_convert"]
    assert listed == ["model.language_model.embed_tokens", "mtp"]
    _, config, _ = _merged(tmp_path / "named", "awq", False)
    assert config["quantization_config"]["modules_to_not_convert"] == ["visual", "mtp"]


def test_both_modelopt_files_name_the_head(tmp_path: Path) -> None:
    _, config, beside = _merged(tmp_path, "modelopt", True)
    assert config["quantization_config"]["ignore"][-1] == "mtp*"
    assert beside["quantization"]["exclude_modules"] == ["lm_head", "model.embed_tokens*", "mtp*"]


def test_a_nested_declaration_is_found(tmp_path: Path) -> None:
    config = tiny_qwen3_5()
    write(checkpoint(config), tmp_path / "head", 1)
    folder = headless(config)
    folder.config["text_config"]["quantization_config"] = {"quant_method": "quark", "exclude": []}
    write(folder, tmp_path / "base", 2)
    plan = plan_merge(
        open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "head"), tmp_path / "out", MergeOptions()
    )
    (edit,) = plan.edits
    assert edit.path == "text_config.quantization_config.exclude"
    assert "mtp.fc" in edit.after


def test_mixed_precision_forgets_the_head_and_nothing_else() -> None:
    layers = {"mtp.fc": {"quant_algo": "FP8"}, "mtp.fcx": {"quant_algo": "FP8"}, "model.layers.0.mlp": {}}
    declared = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    names = HeadNames(("mtp.fc",), (), ("mtp",), True)
    out = exempt(declared, names, ())
    assert list(out["quantization"]["quantized_layers"]) == ["mtp.fcx", "model.layers.0.mlp"]
    assert "mtp.fc" in declared["quantization"]["quantized_layers"]


def test_a_head_that_is_partly_quantised_gets_names_and_no_wildcard() -> None:
    names = HeadNames(("mtp.fc", "mtp.layers.0.mlp.gate"), (), ("mtp",), False)
    for method, field in (("modelopt", "ignore"), ("compressed-tensors", "ignore"), ("quark", "exclude")):
        assert exempt({"quant_method": method}, names, ())[field] == ["mtp.fc", "mtp.layers.0.mlp.gate"]
    rules = exempt({"quant_method": "gptq"}, names, ())["dynamic"]
    assert len(rules) == 2
    assert all("fc" in r or "gate" in r for r in rules)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(NextnError, match="does not know"):
        exempt({"quant_method": "someone-elses"}, HeadNames(("mtp.fc",), (), ("mtp",), True), ())


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("scheme", schemes.declarations())
def test_inspect_finds_nothing_wrong_with_what_was_written(tmp_path: Path, scheme: str, moe: bool) -> None:
    out, _, _ = _merged(tmp_path, scheme, moe)
    wrong = [
        (f.code, f.message)
        for f in examine(open_checkpoint(out)).findings
        if f.code.startswith(("quant-unlisted", "quant-listed", "scales", "head"))
    ]
    assert wrong == []
