"""GGUF heads: the same canonical names as the safetensors layouts, counted from block_count."""

from __future__ import annotations

import gguf
import pytest

from nextn.errors import NextnError
from nextn.families.gguf import ARCHITECTURES, gguf_declared, gguf_family, gguf_geometry
from nextn.families.registry import FAMILIES

QWEN = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 65,
    "qwen35.nextn_predict_layers": 1,
    "qwen35.embedding_length": 5120,
    "qwen35.feed_forward_length": 17408,
    "qwen35.attention.head_count": 24,
    "qwen35.attention.head_count_kv": 4,
    "qwen35.attention.key_length": 256,
    "tokenizer.ggml.tokens": {"length": 248320},
}


def test_qwen35_head() -> None:
    family = gguf_family("qwen35")
    assert family is not None
    dims = gguf_geometry(QWEN)
    assert gguf_declared(QWEN) == (1, "qwen35.nextn_predict_layers")
    assert dims["layers"] == 64
    assert dims["vocab"] == 248320
    expected = {key: shape for _, key, shape, spec in family.expected(dims, 1) if not spec.optional}
    assert len(expected) == 15
    assert expected["blk.64.nextn.eh_proj.weight"] == (5120, 10240)
    assert expected["blk.64.attn_q.weight"] == (2 * 24 * 256, 5120)
    assert expected["blk.64.attn_output.weight"] == (5120, 24 * 256)
    assert expected["blk.64.ffn_down.weight"] == (5120, 17408)
    assert family.confidence == "full"


def test_canonical_names_are_those_of_the_family() -> None:
    qwen = next(f for f in FAMILIES if f.name == "qwen3_5")
    ours = {spec.name.replace("mtp.{i}.", "mtp.0.") for spec in qwen.head if not spec.when}
    layout = gguf_family("qwen35")
    assert layout is not None
    names = {name for name, _, _, spec in layout.expected(gguf_geometry(QWEN), 1) if not spec.optional}
    assert names == {name for name in ours if name != "mtp.0.embed.weight"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_and_names_map_both_ways(architecture: str) -> None:
    family = gguf_family(architecture)
    assert family is not None
    assert family.name in {f.name for f in FAMILIES}
    sizes = {"embedding_length": 64, "attention.head_count": 4, "expert_count": 8, "block_count": 12}
    sizes |= {
        "feed_forward_length": 128,
        "attention.q_lora_rank": 16,
        "attention.kv_lora_rank": 8,
        "attention.indexer.head_count": 2,
    }
    sizes |= {"expert_feed_forward_length": 32, "expert_shared_count": 1, "vocab_size": 100, "nextn_predict_layers": 2}
    metadata = {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in sizes.items()}
    dims = gguf_geometry(metadata)
    assert dims["layers"] == 10
    keys = set()
    for experts in ("split", "grouped"):
        for name, key, _, _ in family.expected(dims, 2, experts=experts):
            located = family.locate(key, layers=10)
            assert located is not None
            assert located.name == name
            assert family.key_of(name, layers=10, experts=experts) == key
            keys.add(key)
    assert {"blk.10.nextn.eh_proj.weight", "blk.11.nextn.hnorm.weight"} <= keys


def test_nextn_names_are_those_of_the_gguf_package() -> None:
    theirs = {
        name.replace("{bid}", "{n}") + ".weight"
        for tensor, name in gguf.TENSOR_NAMES.items()
        if tensor.name.startswith("NEXTN")
    }
    family = gguf_family("glm4moe")
    assert family is not None
    assert {spec.key for spec in family.head if ".nextn." in spec.key} == theirs


def test_block_names_are_those_of_the_gguf_package() -> None:
    known = {name.replace("{bid}", "{n}") for name in gguf.TENSOR_NAMES.values()}
    for architecture in ARCHITECTURES:
        family = gguf_family(architecture)
        assert family is not None
        for spec in family.head:
            assert spec.key.rsplit(".", 1)[0] in known


def test_other_architectures_have_none() -> None:
    assert gguf_family("llama") is None
    assert gguf_declared({"general.architecture": "llama"}) == (None, None)


@pytest.mark.parametrize("value", [-1, 1 << 40, "1", True, 1.5, [1]])
def test_a_count_that_cannot_be_is_an_error(value: object) -> None:
    with pytest.raises(NextnError, match="nextn_predict_layers"):
        gguf_geometry(QWEN | {"qwen35.nextn_predict_layers": value})


def test_layer_lists_and_odd_values_do_not_fail() -> None:
    dims = gguf_geometry(QWEN | {"qwen35.attention.head_count": [8, 24], "qwen35.feed_forward_length": "x"})
    assert dims["heads"] == 24
    assert "inter" not in dims
    assert gguf_geometry({}).get("layers") is None


def test_an_undeclared_head_begins_at_the_first_block_with_a_fusion() -> None:
    silent = {k: v for k, v in QWEN.items() if "nextn" not in k}
    assert gguf_geometry(silent)["layers"] == 65
    assert gguf_geometry(silent, ["blk.3.attn_q.weight", "blk.64.nextn.eh_proj.weight"])["layers"] == 64
    assert gguf_geometry(QWEN, ["blk.2.nextn.eh_proj.weight"])["layers"] == 64, "what is declared counts"
