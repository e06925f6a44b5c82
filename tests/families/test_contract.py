"""Every field of every contract, the geometry on odd configs, and look-alikes in unknown families."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.errors import NextnError
from nextn.families.contract import size
from nextn.families.geometry import geometry
from nextn.families.lookalike import keys_like_head, looks_like_head
from nextn.families.registry import FAMILIES, declared_layers, family_geometry, find_family
from tests.families.published import PUBLISHED

BY_NAME = {family.name: family for family in FAMILIES}
SPECIAL: dict[str, dict[str, object]] = {
    "qwen3_next": {"norm": "one_plus"},
    "qwen3_5": {"norm": "one_plus"},
    "qwen3_5_moe": {"norm": "one_plus"},
    "qwen4_exp": {"norm": "one_plus", "fuse": "sum", "target_hidden": "pre_norm", "recycle": "pre_norm"},
    "exaone_moe": {"embedding": "tied", "output_head": "tied"},
    "exaone4_5": {"embedding": "tied", "output_head": "tied"},
    "deepseek_v3": {"zero_embed_at_start": True},
    "deepseek_v4": {
        "fuse": "sum",
        "target_hidden": "pre_norm",
        "recycle": "pre_norm",
        "zero_embed_at_start": True,
        "embedding": "own",
        "output_head": "own",
    },
    "glm4_moe": {"zero_embed_at_start": True},
    "glm4_moe_lite": {"zero_embed_at_start": True},
    "glm_moe_dsa": {"zero_embed_at_start": True},
    "glm5_next": {"zero_embed_at_start": True},
    "glm_ocr": {"zero_embed_at_start": True},
    "mimo": {"order": "hidden_first", "zero_embed_at_start": True},
    "mimo_v2_flash": {"target_hidden": "pre_norm", "recycle": "pre_norm", "physical_layers": "one_each"},
    "mimo_v2": {"target_hidden": "pre_norm", "recycle": "pre_norm", "physical_layers": "one_each"},
    "nemotron_h": {},
    "step3p5": {
        "norm": "one_plus",
        "target_hidden": "pre_norm",
        "recycle": "pre_norm",
        "physical_layers": "chain",
        "output_head": "own",
    },
    "step3p7": {
        "norm": "one_plus",
        "target_hidden": "pre_norm",
        "recycle": "pre_norm",
        "physical_layers": "chain",
        "output_head": "own",
    },
    "ernie4_5_moe": {
        "recycle": "pre_norm",
        "zero_embed_at_start": True,
        "embedding": "tied",
        "output_head": "tied",
    },
    "longcat_flash": {},
    "bailing_hybrid": {"zero_embed_at_start": True},
    "bailing_moe_v2": {},
    "hy_v3": {"zero_embed_at_start": True},
    "hy_v4": {"zero_embed_at_start": True},
    "minimax_m2": {"confidence": "partial"},
    "minimax_m3_vl": {
        "norm": "one_plus",
        "recycle": "pre_norm",
        "zero_embed_at_start": True,
        "physical_layers": "chain",
    },
    "kimi_k3": {
        "recycle": "pre_norm",
        "zero_embed_at_start": True,
        "output_head": "own",
        "confidence": "partial",
    },
    "inkling": {
        "order": "hidden_first",
        "target_hidden": "pre_norm",
        "physical_layers": "chain",
        "confidence": "partial",
    },
    "llama": {},
    "qwen2": {},
    "qwen3": {},
}
"""What differs from the usual head: concatenation with the embedding first, plain norms, all else shared."""
USUAL: dict[str, object] = {
    "fuse": "concat",
    "order": "embed_first",
    "norm": "plain",
    "target_hidden": "post_norm",
    "recycle": "post_norm",
    "zero_embed_at_start": False,
    "physical_layers": "reuse",
    "embedding": "shared",
    "output_head": "shared",
    "confidence": "full",
}
DEFAULT_LAYERS = {
    "qwen3_next": 1,
    "qwen3_5": 1,
    "qwen3_5_moe": 1,
    "qwen4_exp": 1,
    "mimo_v2_flash": 3,
    "mimo_v2": 3,
    "step3p5": 3,
    "step3p7": 3,
    "longcat_flash": 1,
}


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_contract_fields(name: str) -> None:
    family = BY_NAME[name]
    assert {field: getattr(family, field) for field in USUAL} == USUAL | SPECIAL[name]
    assert family.default_layers == DEFAULT_LAYERS.get(name)
    assert family.source
    assert family.block
    assert bool(family.note) or family.confidence == "full"


def fuse_shapes(name: str) -> set[tuple[str, ...]]:
    return {spec.shape for spec in BY_NAME[name].head if spec.name.endswith((".fuse.weight", ".fuse_embed.weight"))}


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_fusion_tensors_say_what_the_field_says(name: str) -> None:
    wanted = ("hidden", "2*hidden") if BY_NAME[name].fuse == "concat" else ("hidden", "hidden")
    assert fuse_shapes(name) == {wanted}


def test_size_expressions() -> None:
    dims = {"a": 3, "b": 5}
    assert size("2*a+a*b+7", dims) == 28
    with pytest.raises(KeyError, match="c"):
        size("a*c", dims)


@pytest.mark.parametrize("value", ["x", -1, 1.5, True, 1 << 60])
def test_bad_values_fail_where_they_are_needed_and_only_there(value: Any) -> None:
    family = BY_NAME["qwen3_5"]
    config = PUBLISHED["Qwen3.5-27B"].config
    text = config["text_config"] | {"vocab_size": value, "linear_num_key_heads": value}
    dims = family_geometry(family, config | {"text_config": text})
    specs = {spec.name: spec for spec in family.head}
    assert specs["mtp.0.fuse.weight"].sizes(dims) == (5120, 10240)
    with pytest.raises(NextnError, match="vocab_size"):
        specs["mtp.0.embed.weight"].sizes(dims)


def test_absent_values_are_key_errors() -> None:
    family = BY_NAME["qwen3_5"]
    dims = family_geometry(family, {"model_type": "qwen3_5", "text_config": {"hidden_size": None}})
    with pytest.raises(KeyError, match="hidden"):
        list(family.expected(dims, 1))


@pytest.mark.parametrize("value", ["1", -1, True, 5000, 10**30, [1], 1.0])
def test_counts_that_cannot_be(value: Any) -> None:
    with pytest.raises(NextnError, match="mtp_num_hidden_layers"):
        declared_layers(BY_NAME["qwen3_5"], {"text_config": {"mtp_num_hidden_layers": value}})


def test_absurd_products_are_refused_before_they_are_listed() -> None:
    family = BY_NAME["qwen3_5_moe"]
    config = PUBLISHED["Qwen3.5-397B"].config
    dims = family_geometry(family, config | {"text_config": config["text_config"] | {"num_experts": 1 << 19}})
    with pytest.raises(NextnError, match="cannot be"):
        list(family.expected(dims, 4096))


@pytest.mark.parametrize(
    "number",
    ["01", "-1", "1" * 5000, "1e3", "٣", "", "1000000"],
    ids=["zero", "minus", "long", "exp", "arabic", "none", "big"],
)
def test_layer_numbers_that_are_none(number: str) -> None:
    assert BY_NAME["deepseek_v3"].locate(f"model.layers.{number}.eh_proj.weight", layers=0) is None
    assert BY_NAME["qwen3_5"].locate(f"mtp.layers.{number}.input_layernorm.weight") is None


odd: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("full_attention"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({field for case in PUBLISHED.values() for field in (case.config.get("text_config") or case.config)})


@settings(max_examples=300, deadline=None)
@given(
    case=st.sampled_from(sorted(PUBLISHED)),
    changes=st.dictionaries(st.sampled_from(FIELDS), odd, max_size=4),
    top=st.dictionaries(st.sampled_from(["text_config", "architectures", "model_type", "mtp_config"]), odd, max_size=2),
)
def test_odd_configs_never_raise_anything_else(case: str, changes: dict[str, Any], top: dict[str, Any]) -> None:
    config = dict(PUBLISHED[case].config)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = config["text_config"] | changes
    else:
        config |= changes
    config |= top
    family = find_family(config)
    if family is None:
        return
    dims = family_geometry(family, config)
    try:
        count = declared_layers(family, config)[0] or 1
        for _, _, shape, _ in family.expected(dims, min(count, 2)):
            assert all(isinstance(n, int) for n in shape)
    except (NextnError, KeyError):
        return


def test_find_family_prefers_the_top_model_type() -> None:
    step = find_family({"model_type": "step3p7", "text_config": {"model_type": "step3p5"}})
    assert step is not None
    assert step.name == "step3p7"
    by_architecture = find_family({"architectures": [None, {}, "Glm4MoeForCausalLM"]})
    assert by_architecture is not None
    assert by_architecture.name == "glm4_moe"
    assert find_family({"model_type": ["x"], "architectures": "GlmX"}) is None
    assert geometry({"text_config": "x", "hidden_size": 8})["hidden"] == 8


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        (["model.layers.0.mlp.up_proj.weight", "lm_head.weight"], []),
        (["mtp.fc.weight", "mtp.layers.0.x", "model.layers.4.eh_proj.weight"], ["mtp", "model.layers.4"]),
        (["model.mtp_layers.0.a", "model.mtp_layers.1.a"], ["model.mtp_layers"]),
        (["blk.9.nextn.enorm.weight"], ["blk.9.nextn"]),
        (["medusa_head.0.weight", "eagle.fc.weight"], ["medusa_head", "eagle"]),
        (["model.layers.9.enorm.weight", "model.layers.9.hnorm.weight"], ["model.layers.9"]),
        (["enorm.weight", "model.temptation.weight", "smtp.weight", "model.norm.weight"], []),
        ([".".join(["a"] * 10_000)], []),
    ],
)
def test_lookalikes(keys: list[str], groups: list[str]) -> None:
    assert looks_like_head(keys) == groups


def test_keys_of_groups_that_look_like_a_head() -> None:
    keys = ["model.layers.3.q.weight", "model.layers.4.eh_proj.weight", "model.layers.4.mlp.up.weight", "mtp.fc.weight"]
    assert keys_like_head(keys) == tuple(keys[1:])
    assert keys_like_head(keys[:1]) == ()
    assert keys_like_head(["a." * 200 + "mtp.weight"]) == (), "the first 64 parts count"


def test_families_whose_configs_say_no_count_ship_a_head_all_the_same() -> None:
    silent = {f.name for f in FAMILIES if not f.declares_count}
    assert silent == {"qwen3_next", "longcat_flash", "mimo_v2", "mimo_v2_flash"}
    assert all(f.default_layers for f in FAMILIES if not f.declares_count)
    assert {f.name: f.spare_layers for f in FAMILIES if f.spare_layers} == {"hy_v4": 1}
