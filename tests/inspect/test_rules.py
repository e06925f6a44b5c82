"""Every kind of finding that the field reports do not cover, on the smallest input that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nextn.assets import embedded_model
from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.examine import Report, examine
from nextn.inspect.quant.read import read_scheme
from nextn.inspect.quant.stored import split_key
from tests.fixtures import HEAD_SHARD, TRUNK_SHARD, Folder, checkpoint, qwen3_5, qwen3_5_moe, qwen3_next
from tests.inspect.cases import ATTENTION, MLP, compressed, modelopt

SMALL = {"hidden": 256, "inter": 512, "layers": 4, "heads": 2, "kv_heads": 1, "gdn_v_heads": 4}
LINEARS = ["mtp.fc", *ATTENTION, *MLP]


def ask(folder: Folder, root: Path, **versions: str) -> Report:
    return examine(open_checkpoint(folder.write(root)), versions)


def codes(report: Report) -> dict[str, str]:
    return {f.code: f.severity for f in report.findings}


def tensors(report: Report, code: str) -> tuple[str, ...]:
    return next(f for f in report.findings if f.code == code).tensors


def small(**quantisation: Any) -> Folder:
    folder = checkpoint(qwen3_5(**SMALL))
    if quantisation:
        folder.config["quantization_config"] = quantisation
    return folder


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


def test_a_list_that_divides_a_fused_module(tmp_path: Path) -> None:
    listed = [m for m in LINEARS if not m.endswith("v_proj")]
    report = ask(small(**compressed(listed)), tmp_path)
    assert codes(report)["quant-fused-split"] == "error"
    assert set(tensors(report, "quant-fused-split")) == set(ATTENTION[:3])
    assert tensors(report, "quant-unlisted") == ("mtp.layers.0.self_attn.v_proj.weight",)
    assert report.engines["sglang"].verdict == report.engines["vllm"].verdict == "fails"


def test_a_quantised_tensor_that_the_list_calls_full(tmp_path: Path) -> None:
    folder = small(quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=LINEARS)
    key = "mtp.layers.0.mlp.down_proj.weight"
    folder.head[key] = ("F8_E4M3", folder.head[key][1])
    folder.head[f"{key}_scale_inv"] = ("F32", (2, 4))
    report = ask(folder, tmp_path)
    assert tensors(report, "quant-exempt-quantised") == (key,)
    assert report.case.claims.stored == "mixed"
    assert report.facts.dtypes == {"BF16": 14, "F8_E4M3": 1}


def test_a_quantised_head_of_which_nothing_is_declared(tmp_path: Path) -> None:
    folder = small()
    quantise_to_fp8(folder)
    report = ask(folder, tmp_path)
    assert codes(report) == {"quant-undeclared": "error", "head-quantised": "info"}
    assert report.as_json()["quantization"]["method"] is None
    assert report.as_json()["quantization"]["head"] == "mixed"


def quantise_to_fp8(folder: Folder, *, scales: bool = True) -> None:
    for module in (*ATTENTION, *MLP):
        key = f"{module}.weight"
        rows, columns = folder.head[key][1]
        folder.head[key] = ("F8_E4M3", (rows, columns))
        if scales:
            folder.head[f"{key}_scale_inv"] = ("F32", (-(-rows // 128), -(-columns // 128)))


def test_a_head_quantised_like_its_target_is_clean(tmp_path: Path) -> None:
    folder = small(quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["mtp.fc"])
    quantise_to_fp8(folder)
    report = ask(folder, tmp_path)
    assert codes(report) == {"head-quantised": "info"}
    assert report.facts.complete
    assert report.engines["sglang"].verdict == report.engines["vllm"].verdict == "works"


def test_quantised_weights_without_scales(tmp_path: Path) -> None:
    folder = small(quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["mtp.fc"])
    quantise_to_fp8(folder, scales=False)
    report = ask(folder, tmp_path)
    assert set(tensors(report, "scales-missing")) == {f"{m}.weight" for m in (*ATTENTION, *MLP)}


def test_two_declarations_that_disagree(tmp_path: Path) -> None:
    folder = small(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head", "mtp*"])
    folder.extra["hf_quant_config.json"] = modelopt(["mtp.layers.0*"])
    report = ask(folder, tmp_path)
    assert codes(report) == {"quant-config-conflict": "warning"}
    assert tensors(report, "quant-config-conflict") == ("mtp.fc",)
    folder.extra["hf_quant_config.json"] = modelopt(["mtp*"])
    assert codes(ask(folder, tmp_path)) == {}
    folder.extra["hf_quant_config.json"]["quantization"]["quant_algo"] = "FP8"
    assert codes(ask(folder, tmp_path)) == {"quant-config-conflict": "warning"}


def test_an_entry_of_the_target_under_another_prefix(tmp_path: Path) -> None:
    trunk = ["model.language_model.layers.0.linear_attn.in_proj_a.weight"]
    folder = checkpoint(qwen3_5(**SMALL), trunk=trunk)
    folder.config["quantization_config"] = compressed(["re:.*mtp.*", "model.layers.0.linear_attn.in_proj_a"])
    report = ask(folder, tmp_path)
    assert set(codes(report)) == {"prefix-mismatch"}
    assert tensors(report, "prefix-mismatch") == ("model.layers.0.linear_attn.in_proj_a",)
    folder.config["quantization_config"] = compressed(["re:.*mtp.*", trunk[0].removesuffix(".weight")])
    assert codes(ask(folder, tmp_path)) == {}


def test_an_entry_of_the_head_under_another_prefix(tmp_path: Path) -> None:
    folder = small(**compressed(["re:model\\.mtp\\..*"]))
    report = ask(folder, tmp_path)
    assert set(codes(report)) == {"prefix-mismatch"}
    assert report.engines["vllm"].reasons == ("prefix-mismatch",)
    assert codes(report)["prefix-mismatch"] == "error", "vLLM fails on it"


def test_a_pattern_that_cannot_be_evaluated(tmp_path: Path) -> None:
    report = ask(small(**compressed(["re:.*mtp.*", "re:(a+)+$", "re:["])), tmp_path)
    assert codes(report) == {"quant-rule-invalid": "warning"}
    assert tensors(report, "quant-rule-invalid") == ("re:(a+)+$", "re:[")


def test_a_name_that_only_the_engine_uses(tmp_path: Path) -> None:
    """SGLang builds a Qwen3-Next head as layer 0 of a model of its own, so that entries about mtp miss it."""
    folder = checkpoint(qwen3_next(4))
    folder.config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mtp.*": {}}}
    report = ask(folder, tmp_path)
    assert codes(report) == {"quant-runtime-name": "info"}
    assert report.engines["sglang"].reasons == ("quant-runtime-name",)
    assert report.engines["vllm"].verdict == "works"


@given(listed=st.sets(st.sampled_from(LINEARS)))
def test_what_is_not_listed_is_what_is_reported(listed: set[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = small(quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=sorted(listed))
    report = ask(folder, tmp_path_factory.mktemp("listed"))
    wrong = next((f.tensors for f in report.findings if f.code == "quant-unlisted"), ())
    assert set(wrong) == {f"{m}.weight" for m in LINEARS if m not in listed}


SPARED = {
    "modelopt": lambda m: {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [m]},
    "modelopt file": lambda m: {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": [m]},
    },
    "modelopt glob": lambda m: {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [m[:-2] + "*"]},
    "compressed-tensors": lambda m: compressed([m]),
    "compressed-tensors re": lambda m: compressed(["re:.*" + m.rpartition(".")[2]]),
    "fp8": lambda m: {"quant_method": "fp8", "modules_to_not_convert": [m]},
    "fp8 ignored_layers": lambda m: {"quant_method": "fp8", "ignored_layers": [m]},
    "gptq": lambda m: {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*" + m.replace(".", "\\."): {}}},
    "awq": lambda m: {"quant_method": "awq", "bits": 4, "modules_to_not_convert": [m]},
    "auto-round": lambda m: {"quant_method": "auto-round", "bits": 4, "extra_config": {m: {"bits": 16}}},
    "bitsandbytes": lambda m: {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": [m]},
    "quark": lambda m: {"quant_method": "quark", "exclude": [m]},
    "quark re": lambda m: {"quant_method": "quark", "exclude": ["re:.*" + m.rpartition(".")[2]]},
}
CHOSEN = {
    "auto-round blocks": {"quant_method": "auto-round", "bits": 4, "block_name_to_quantize": "model.layers"},
    "gptq modules": {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["self_attn.k_proj"]]},
    "compressed-tensors targets": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["re:.*mlp.experts.*"], "weights": {"num_bits": 4}}},
    },
    "modelopt layers": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}},
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


@pytest.mark.parametrize("scheme", SPARED)
def test_each_schemes_own_way_to_spare_a_module(scheme: str) -> None:
    module, other = "mtp.layers.0.self_attn.o_proj", "mtp.layers.0.mlp.down_proj"
    read = read_scheme(SPARED[scheme](module), "config.json", "quantization_config")
    assert read.by_default
    assert not read.claims_quantised(module)
    assert read.claims_quantised(other)
    assert read.invalid == ()


@pytest.mark.parametrize("scheme", CHOSEN)
def test_each_schemes_own_way_to_choose_modules(scheme: str) -> None:
    read = read_scheme(CHOSEN[scheme], "config.json", "quantization_config")
    assert not read.by_default
    assert not read.claims_quantised("mtp.layers.0.self_attn.o_proj")
    chosen = {"auto-round blocks": "model.layers.3.mlp.up_proj", "gptq modules": "model.layers.3.self_attn.k_proj"}
    assert read.claims_quantised(chosen.get(scheme, "model.layers.0.mlp.experts.5.up_proj"))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.floats(allow_nan=False),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["ignore", "dynamic", "exclude", "config_groups", "targets", "quantization", "extra_config"]
                )
                | st.text(max_size=6),
                inner,
                max_size=5,
            )
        ),
        max_leaves=20,
    ),
    st.sampled_from(
        ["gptq", "fp8", "modelopt", "compressed-tensors", "quark", "auto-round", "awq", "bitsandbytes", "mxfp4"]
    ),
)
def test_no_declaration_however_odd_stops_the_reader(body: Any, method: str) -> None:
    raw = {"quant_method": method, **(body if isinstance(body, dict) else {"ignore": body})}
    scheme = read_scheme(raw, "config.json", "quantization_config")
    assert scheme.claims_quantised("mtp.fc") in (True, False)


def fill(root: Path, value: Any, *, norms: float | None = None, seed: int = 0) -> None:
    """Write values into a head: a number, or "normal"; norms may hold another number."""
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
        else:
            numbers = np.full(count, value, np.float32)
        raw = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
        with (root / info.file).open("r+b") as file:
            file.seek(info.start)
            file.write(raw)


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


@pytest.mark.parametrize(
    ("key", "module", "part"),
    [
        ("mtp.fc.weight", "mtp.fc", "weight"),
        ("mtp.fc.weight_scale_inv", "mtp.fc", "weight_scale_inv"),
        ("mtp.fc.weight.absmax", "mtp.fc", "absmax"),
        ("mtp.fc.weight.quant_state.bitsandbytes__nf4", "mtp.fc", "quant_state"),
        ("a.experts.gate_up_proj", "a.experts.gate_up_proj", "weight"),
        ("a.experts.gate_up_proj_blocks", "a.experts.gate_up_proj", "blocks"),
        ("a.experts.gate_up_proj_scales", "a.experts.gate_up_proj", "scales"),
        ("a.experts.gate_up_proj_scale_inv", "a.experts.gate_up_proj", "scale_inv"),
        ("a.experts.down_proj_weight_scale", "a.experts.down_proj", "scale"),
        ("a.experts.down_proj_weight_scale_2", "a.experts.down_proj", "weight_scale_2"),
        ("a.experts.3.down_proj.weight", "a.experts.3.down_proj", "weight"),
        ("a.linear_attn.dt_bias", "a.linear_attn.dt_bias", ""),
        ("a.q_proj.bias", "a.q_proj", "bias"),
    ],
)
def test_keys_are_taken_apart_into_module_and_part(key: str, module: str, part: str) -> None:
    assert split_key(key) == (module, part)


QUANTISED_AS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, Callable[[int, int], tuple[int, ...]]]]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mtp.fc": {}}},
        {
            "qweight": ("I32", lambda o, i: (i // 8, o)),
            "qzeros": ("I32", lambda o, i: (i // 128, o // 8)),
            "scales": ("F16", lambda o, i: (i // 128, o)),
            "g_idx": ("I32", lambda o, i: (i,)),
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["mtp.fc"]},
        {
            "qweight": ("I32", lambda o, i: (i, o // 8)),
            "qzeros": ("I32", lambda o, i: (i // 128, o // 8)),
            "scales": ("F16", lambda o, i: (i // 128, o)),
        },
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["mtp.fc"]},
        {
            "weight": ("U8", lambda o, i: (o, i // 2)),
            "weight_scale": ("F8_E4M3", lambda o, i: (o, i // 16)),
            "weight_scale_2": ("F32", lambda o, i: ()),
            "input_scale": ("F32", lambda o, i: ()),
        },
    ),
    "compressed int4": (
        compressed(["mtp.fc"]),
        {
            "weight_packed": ("I32", lambda o, i: (o, i // 8)),
            "weight_scale": ("BF16", lambda o, i: (o, i // 128)),
            "weight_shape": ("I64", lambda o, i: (2,)),
        },
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["mtp.fc"]},
        {
            "weight": ("U8", lambda o, i: (o * i // 2, 1)),
            "weight.absmax": ("U8", lambda o, i: (o * i // 64,)),
            "weight.quant_map": ("F32", lambda o, i: (16,)),
            "weight.quant_state.bitsandbytes__nf4": ("U8", lambda o, i: (80,)),
        },
    ),
}


@pytest.mark.parametrize("scheme", QUANTISED_AS)
def test_a_head_stored_in_each_scheme_is_whole(scheme: str, tmp_path: Path) -> None:
    declared, parts = QUANTISED_AS[scheme]
    folder = small(**declared)
    for module in (*ATTENTION, *MLP):
        _, (rows, columns) = folder.head.pop(f"{module}.weight")
        folder.put({f"{module}.{part}": (dtype, shape(rows, columns)) for part, (dtype, shape) in parts.items()})
    report = ask(folder, tmp_path)
    assert codes(report).keys() - {"quant-listed-unfused"} == {"head-quantised"}
    assert report.facts.complete
    assert report.facts.found == 15
    assert report.case.claims.stored == "mixed"
    stored = sum(t.nbytes for k, t in open_checkpoint(tmp_path).tensors.items() if k.startswith("mtp."))
    assert report.facts.nbytes == stored


NAMES = [*LINEARS, "mtp.layers.0.self_attn.qkv_proj", "mtp.layers.0.mlp.gate_up_proj", "mtp.layers.0", "mtp", "lm_head"]
ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["", "model.", "model.language_model."]),
        st.sampled_from(NAMES),
        st.sampled_from(["", "*", "re:"]),
    ),
    max_size=8,
)
LISTS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "modelopt": lambda e: {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": e},
    "compressed-tensors": compressed,
    "fp8": lambda e: {"quant_method": "fp8", "modules_to_not_convert": e},
    "gptq": lambda e: {
        "quant_method": "gptq",
        "bits": 4,
        "dynamic": {"-:" + x.removeprefix("re:").rstrip("*"): {} for x in e},
    },
    "awq": lambda e: {"quant_method": "awq", "modules_to_not_convert": e},
    "auto-round": lambda e: {"quant_method": "auto-round", "bits": 4, "extra_config": {x: {"bits": 16} for x in e}},
    "bitsandbytes": lambda e: {"quant_method": "bitsandbytes", "llm_int8_skip_modules": e},
    "quark": lambda e: {"quant_method": "quark", "exclude": e},
}


@given(scheme=st.sampled_from(sorted(LISTS)), entries=ENTRIES, old=st.booleans())
def test_reasons_are_codes_of_findings_whatever_the_lists_say(
    scheme: str, entries: list[tuple[str, str, str]], old: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    texts = [
        f"re:{prefix}{name}".replace(".", "\\.") if mark == "re:" else f"{prefix}{name}{mark}"
        for prefix, name, mark in entries
    ]
    folder = small(**LISTS[scheme](texts))
    report = ask(folder, tmp_path_factory.mktemp("lists"), **({"sglang": "0.5.17"} if old else {}))
    found = set(codes(report))
    for name, verdict in report.engines.items():
        assert set(verdict.reasons) <= found, name
        assert (verdict.verdict == "fails") == bool(verdict.error), name
    unlisted = {f.code: f.tensors for f in report.findings}.get("quant-unlisted", ())
    assert all(key.removesuffix(".weight") not in texts for key in unlisted)


def test_the_embedded_model_is_clean_down_to_its_values() -> None:
    report = examine(open_checkpoint(embedded_model()), values=lambda done, total: None)
    assert report.findings == ()
    assert report.facts.complete
    assert report.engines["nextn"].verdict == "works"
