"""Findings about quantisation: how lists are read, what they claim, and what the headers say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.quant.read import read_scheme
from nextn.inspect.quant.stored import split_key
from tests.fixtures import Folder, checkpoint, qwen3_5, qwen3_next
from tests.inspect.asking import LINEARS, SMALL, ask, codes, small, tensors
from tests.inspect.cases import ATTENTION, MLP, compressed, modelopt


def test_a_list_that_divides_a_fused_module(tmp_path: Path) -> None:
    listed = [m for m in LINEARS if not m.endswith("v_proj")]
    report = ask(small(**compressed(listed)), tmp_path)
    assert codes(report)["quant-fused-split"] == "error"
    assert set(tensors(report, "quant-fused-split")) == {f"{m}.weight" for m in ATTENTION[:3]}
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
    assert tensors(report, "quant-config-conflict") == ("mtp.fc.weight",)
    conflict = next(f for f in report.findings if f.code == "quant-config-conflict")
    assert conflict.command == f"rm {tmp_path}/hf_quant_config.json"
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
    assert tensors(report, "prefix-mismatch") == tuple(trunk)
    fix = report.findings[0].fix
    assert '{"model.layers.0.linear_attn.in_proj_a": "model.language_model.layers.0.linear_attn.in_proj_a"}' in fix
    assert {report.engines[e].verdict for e in ("sglang", "vllm")} == {"fails"}, "bf16 does not fit packed FP4"
    folder.config["quantization_config"] = {
        "quant_method": "fp8",
        "modules_to_not_convert": [*LINEARS, "model.layers.0.linear_attn.in_proj_a"],
    }
    report = ask(folder, tmp_path)
    assert codes(report) == {"prefix-mismatch": "warning"}
    assert {report.engines[e].verdict for e in ("sglang", "vllm")} == {"degraded"}, "bf16 is cast to FP8"
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
    assert tensors(report, "quant-rule-invalid") == ()
    assert '["re:(a+)+$", "re:["]' in report.findings[0].fix


def test_a_name_that_only_the_engine_uses(tmp_path: Path) -> None:
    """SGLang builds a Qwen3-Next head as layer 0 of a model of its own, so that entries about mtp miss it."""
    folder = checkpoint(qwen3_next(4))
    folder.config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mtp.*": {}}}
    report = ask(folder, tmp_path)
    assert codes(report) == {"quant-runtime-name": "error"}
    assert report.engines["sglang"].reasons == ("quant-runtime-name",)
    assert report.engines["sglang"].verdict == "fails"
    assert report.engines["vllm"].verdict == "works"
    assert report.findings[0].command == report.engines["vllm"].command, "no list can tell the head from layer 0"


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


def test_warnings_of_the_expression_compiler_do_not_reach_the_user(recwarn: pytest.WarningsRecorder) -> None:
    scheme = read_scheme(compressed(["re:[[a]mtp.*"]), "config.json", "quantization_config")
    assert scheme.claims_quantised("mtp.fc")
    assert [w for w in recwarn if issubclass(w.category, FutureWarning)] == []
