"""Every family's layout: both directions, counts against published heads, shapes by hand."""

from __future__ import annotations

import re

import pytest

from nextn.families.contract import ANY, Family, TensorSpec, fits, join
from nextn.families.registry import FAMILIES, declared_layers, family_geometry, find_family
from tests.families.published import PUBLISHED, Published

CASES = [pytest.param(case, id=name) for name, case in PUBLISHED.items()]


def family_of(case: Published) -> Family:
    family = find_family(case.config)
    assert family is not None
    return family


def head_of(case: Published, experts: str = "split") -> list[tuple[str, str, tuple[int, ...], TensorSpec]]:
    family = family_of(case)
    return list(family.expected(family_geometry(family, case.config), case.heads, experts=experts))


def test_every_family_has_a_published_case() -> None:
    own_layouts = {"llama", "qwen2", "qwen3"}
    assert {case.family for case in PUBLISHED.values()} | own_layouts == {family.name for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_head_keys_start_alike_and_prefixes_begin_with_none(family: Family) -> None:
    assert len({spec.key.startswith("model.") for spec in family.head}) == 1
    assert family.prefixes[0] == ""


def test_names_architectures_and_model_types_are_unique() -> None:
    for values in (
        [f.name for f in FAMILIES],
        [a for f in FAMILIES for a in f.architectures],
        [m for f in FAMILIES for m in f.model_types],
    ):
        assert len(values) == len(set(values))
    assert all(re.fullmatch(r"[a-z0-9_]+", family.name) for family in FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_family_is_found_and_count_declared(case: Published) -> None:
    family = family_of(case)
    assert family.name == case.family
    declared, by = declared_layers(family, case.config)
    assert by == case.declared_by
    assert (declared if declared is not None else family.default_layers) == case.heads


@pytest.mark.parametrize("case", CASES)
def test_tensor_count(case: Published) -> None:
    assert sum(not spec.optional for _, _, _, spec in head_of(case)) == case.tensors
    if case.grouped is not None:
        assert sum(not spec.optional for _, _, _, spec in head_of(case, "grouped")) == case.grouped


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("experts", ["split", "grouped"])
def test_keys_and_names_map_both_ways(case: Published, experts: str) -> None:
    family = family_of(case)
    layers = family_geometry(family, case.config).get("layers", 0)
    seen: dict[str, str] = {}
    for name, key, shape, spec in head_of(case, experts):
        assert name not in seen
        assert key not in seen.values()
        seen[name] = key
        assert all(n > 0 or n == ANY for n in shape)
        for prefix in family.prefixes:
            located = family.locate(join(prefix, key), layers=layers)
            assert located is not None
            assert (located.name, located.prefix) == (name, prefix)
            assert family.key_of(name, prefix=prefix, layers=layers, experts=experts) == join(prefix, key)
        for alias in spec.aliases:
            other = alias
            for mark, value in (("{i}", located.indices.get("i", 0)), ("{n}", layers + located.indices.get("i", 0))):
                other = other.replace(mark, str(value))
            other = other.replace("{e}", str(located.indices.get("e", 0)))
            found = family.locate(other, layers=layers)
            assert found is not None
            assert found.name == name


@pytest.mark.parametrize("case", CASES)
def test_target_layers_are_not_the_head(case: Published) -> None:
    family = family_of(case)
    for key in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight", "mtp", ""):
        assert family.locate(key, layers=40) is None


@pytest.mark.parametrize(
    ("case", "key", "shape"),
    [
        ("Qwen3.5-27B", "mtp.fc.weight", (5120, 10240)),
        ("Qwen3.5-27B", "mtp.layers.0.self_attn.q_proj.weight", (2 * 24 * 256, 5120)),
        ("Qwen3.5-397B", "mtp.layers.0.mlp.experts.511.down_proj.weight", (4096, 1024)),
        ("Qwen3.8-Flash-Next", "mtp.pre_fc_norm_hidden.weight", (4 * 2048,)),
        ("Qwen3.8-Flash-Next", "mtp.layers.0.self_attn.indexer.index_qk_proj.weight", (5 * 128, 2048)),
        ("DeepSeek-V3", "model.layers.61.eh_proj.weight", (7168, 14336)),
        ("DeepSeek-V3", "model.layers.61.self_attn.q_b_proj.weight", (128 * 192, 1536)),
        ("DeepSeek-V3", "model.layers.61.self_attn.kv_a_proj_with_mqa.weight", (576, 7168)),
        ("DeepSeek-V3", "model.layers.61.self_attn.kv_b_proj.weight", (128 * 256, 512)),
        ("DeepSeek-V3", "model.layers.61.mlp.gate.e_score_correction_bias", (256,)),
        ("DeepSeek-V3", "model.layers.61.mlp.shared_experts.down_proj.weight", (7168, 2048)),
        ("DeepSeek-V3.2", "model.layers.61.self_attn.indexer.wq_b.weight", (64 * 128, 1536)),
        ("DeepSeek-V4-Flash", "mtp.0.e_proj.weight", (4096, 4096)),
        ("DeepSeek-V4-Flash", "mtp.0.attn.wo_a.weight", (8192, 4096)),
        ("DeepSeek-V4-Flash", "mtp.0.hc_attn_fn", (24, 16384)),
        ("DeepSeek-V4-Flash", "mtp.0.hc_ffn_scale", (3,)),
        ("DeepSeek-V4-Flash", "mtp.0.ffn.experts.255.w2.weight", (4096, 2048)),
        ("GLM-4.6", "model.layers.92.self_attn.q_proj.bias", (96 * 128,)),
        ("GLM-4.6", "model.layers.92.self_attn.k_norm.weight", (128,)),
        ("GLM-4.5-Air", "model.layers.46.mlp.experts.127.up_proj.weight", (1536, 5120)),
        ("GLM-OCR", "model.layers.16.mlp.gate_up_proj.weight", (2 * 4608, 1536)),
        ("MiMo-7B", "model.mtp_layers.0.input_proj.weight", (4096, 8192)),
        ("MiMo-7B", "model.mtp_layers.0.self_attn.v_proj.bias", (1024,)),
        ("MiMo-V2-Flash", "model.mtp.layers.2.self_attn.o_proj.weight", (4096, 64 * 128)),
        ("MiMo-V2-Flash", "model.mtp.layers.1.self_attn.attention_sink_bias", (64,)),
        ("MiMo-V2.5", "model.mtp.layers.0.self_attn.qkv_proj.weight", (64 * 192 + 8 * 192 + 8 * 128, 4096)),
        ("Nemotron-3.5-Lightning-30B", "mtp.layers.0.mixer.q_proj.weight", (32 * 128, 2688)),
        ("Nemotron-3.5-Lightning-30B", "mtp.layers.1.mixer.experts.127.up_proj.weight", (1856, 2688)),
        ("Nemotron-3.5-Lightning-30B", "mtp.layers.1.final_layernorm.weight", (2688,)),
        ("Step-3.5-Flash", "model.layers.47.transformer.shared_head.output.weight", (128896, 4096)),
        ("Step-3.5-Flash", "model.layers.45.self_attn.q_proj.weight", (96 * 128, 4096)),
        ("Step-3.5-Flash", "model.layers.46.self_attn.g_proj.weight", (96, 4096)),
        ("ERNIE-4.5-21B", "model.mtp_linear_proj.0.weight", (2560, 5120)),
        ("LongCat-Flash", "model.mtp.layers.0.transformer_layer.mlp.up_proj.weight", (12288, 6144)),
        ("LongCat-Flash", "model.mtp.layers.0.enorm.m.weight", (6144,)),
        ("Ling-2.5", "model.layers.42.attention.q_proj.weight", (32 * 192, 2560)),
        ("Ling-2.5", "model.layers.42.attention.dense.weight", (2560, 32 * 128)),
        ("Ling-3", "model.layers.42.attention.g_proj.weight", (32, 2560)),
        ("GLM-5.3-Flash", "model.layers.45.self_attn.indexer.index_kpool_compress_ape", (16, 128)),
        ("Ling-2", "model.layers.42.attention.query_key_value.weight", (48 * 128, 2560)),
        ("Hunyuan-V3", "model.layers.80.mlp.router.gate.weight", (192, 4096)),
        ("Hunyuan-V4", "model.mtp_layers.0.self_attn.linear_gate.weight", (128 * 128, 7168)),
        ("MiniMax-M3", "model.mtp.layers.6.transformer_layer.block_sparse_moe.experts.0.w1.weight", (1536, 3072)),
        ("MiniMax-M3", "model.mtp.layers.0.transformer_layer.self_attn.index_q_proj.weight", (512, 3072)),
        ("Kimi-K3", "model.layers.93.block_sparse_moe.experts.3.w2.weight", (3584, 2048)),
        ("Kimi-K3", "model.layers.93.block_sparse_moe.routed_expert_up_proj.weight", (7168, 3584)),
        ("Kimi-K3", "model.layers.93.shared_head.head.weight", (129280, 7168)),
        ("Inkling", "model.mtp.layers.3.transformer_block.attn.wq_du.weight", (ANY, 6144)),
        ("Inkling", "model.mtp.chain_norm.weight", (6144,)),
    ],
)
def test_shapes(case: str, key: str, shape: tuple[int, ...]) -> None:
    assert {k: s for _, k, s, _ in head_of(PUBLISHED[case])}[key] == shape


def test_head_bytes_of_qwen3_5_27b() -> None:
    elements = 0
    for _, _, shape, spec in head_of(PUBLISHED["Qwen3.5-27B"]):
        size = 1
        for n in shape:
            size *= n
        elements += 0 if spec.optional else size
    assert round(2 * elements / 1e6) in range(800, 860)


def test_any_size_fits() -> None:
    assert fits((5, 3), (ANY, 3))
    assert not fits((5, 4), (ANY, 3))
    assert not fits((5,), (ANY, 3))
    assert fits((), ())


def test_copies_are_optional_and_known() -> None:
    family = family_of(PUBLISHED["DeepSeek-V3"])
    for key, name in (("embed_tokens", "mtp.0.embed.weight"), ("shared_head.head", "mtp.0.head.weight")):
        located = family.locate(f"model.layers.61.{key}.weight", layers=61)
        assert located is not None
        assert located.name == name
        assert located.spec.optional


def test_glm_moe_nests_under_a_vision_model() -> None:
    located = family_of(PUBLISHED["GLM-5.3-Flash"]).locate("model.language_model.layers.45.hnorm.weight", layers=45)
    assert located is not None
    assert (located.name, located.prefix) == ("mtp.0.hidden_norm.weight", "model.language_model.")


def test_deepseek_v4_tells_the_other_drafter() -> None:
    family = family_of(PUBLISHED["DeepSeek-V4-Flash"])
    patterns = [re.compile(pattern) for pattern in family.foreign]

    def foreign(key: str) -> bool:
        return any(p.fullmatch(key) for p in patterns)

    for key in ("main_proj.weight", "main_norm.weight", "markov_head.weight", "confidence_head.proj.weight"):
        assert foreign(f"mtp.0.{key}")
    for key in ("e_proj.weight", "attn.wkv.weight", "norm.weight", "head.weight"):
        assert not foreign(f"mtp.0.{key}")


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"mtp_hybrid_override_pattern": "*E"}, ["attention", "moe"]),
        ({"mtp_layers_block_type": ["attention", "moe"]}, ["attention", "moe"]),
        ({"mtp_layers_block_type": ["full_attention", "moe", "moe"]}, ["attention", "moe", "moe"]),
        ({"mtp_hybrid_override_pattern": "E*"}, ["moe", "attention"]),
        ({}, ["attention", "moe"]),
        ({"mtp_hybrid_override_pattern": "??"}, ["attention", "moe"]),
        ({"mtp_layers_block_type": [1, None]}, ["attention", "moe"]),
    ],
)
def test_nemotron_pattern(fields: dict[str, object], kinds: list[str]) -> None:
    case = PUBLISHED["Nemotron-3.5-Lightning-30B"]
    config = {k: v for k, v in case.config.items() if k != "mtp_hybrid_override_pattern"} | fields
    family = family_of(case)
    keys = {key for _, key, _, _ in family.expected(family_geometry(family, config), 1)}
    for j, kind in enumerate(kinds):
        assert (f"mtp.layers.{j}.mixer.q_proj.weight" in keys) == (kind == "attention")
        assert (f"mtp.layers.{j}.mixer.gate.weight" in keys) == (kind == "moe")
    last = len(kinds) - 1
    assert [k for k in keys if "final_layernorm" in k] == [f"mtp.layers.{last}.final_layernorm.weight"]


def test_nemotron_latent_experts() -> None:
    case = PUBLISHED["Nemotron-3.5-Lightning-30B"]
    family = family_of(case)
    dims = family_geometry(family, case.config | {"moe_latent_size": 1024})
    shapes = {key: shape for _, key, shape, _ in family.expected(dims, 1)}
    assert shapes["mtp.layers.1.mixer.experts.0.down_proj.weight"] == (1024, 1856)
    assert shapes["mtp.layers.1.mixer.fc1_latent_proj.weight"] == (1024, 2688)
    assert len(shapes) == 272
