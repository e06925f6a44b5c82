"""Over random layouts: merge then extract is the identity on the head, and every tensor of the base keeps its bytes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nextn.checkpoint.source import open_checkpoint
from nextn.families.contract import Family
from nextn.families.geometry import ALIASES
from nextn.families.registry import FAMILIES, family_geometry
from nextn.surgery.extract import plan_extract
from nextn.surgery.merge import MergeOptions, plan_merge
from nextn.surgery.write import write as carry_out
from tests.fixtures import Entry, Folder, checkpoint
from tests.surgery import schemes
from tests.surgery.builder import (
    digest,
    head_of,
    headless,
    read,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_next,
    trunk_of,
    write,
)

CONFIGS = {"dense": tiny_qwen3_5, "moe": tiny_qwen3_5_moe, "next": tiny_qwen3_next}
PREFIXES = {"dense": ("", "model.language_model."), "moe": ("", "model.", "language_model."), "next": ("",)}
QUANTISED: dict[str, tuple[dict[str, Entry], str]] = {
    "fp8": ({"weight": ("F8_E4M3", (32, 32)), "weight_scale_inv": ("F32", (1, 1))}, "weight"),
    "gptq": ({"qweight": ("I32", (4, 32)), "qzeros": ("I32", (1, 4)), "scales": ("F16", (1, 32))}, "qweight"),
    "modelopt": ({"weight": ("U8", (32, 16)), "weight_scale": ("F8_E4M3", (32, 2))}, "weight"),
}


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(CONFIGS)))
    return {
        "kind": kind,
        "tied": kind == "dense" and draw(st.booleans()),
        "prefix": draw(st.sampled_from(PREFIXES[kind])),
        "experts": draw(st.sampled_from(["split", "grouped"])),
        "dtype": draw(st.sampled_from(["BF16", "F16", "F32"])),
        "scheme": draw(st.sampled_from([None, *schemes.declarations()])),
        "base_shards": draw(st.integers(1, 4)),
        "head_shards": draw(st.integers(1, 3)),
        "old": draw(st.sampled_from(["none", "own shard", "shared shards"])),
        "index": draw(st.booleans()),
        "link": draw(st.sampled_from(["hard", "symlink", "copy"])),
        "seed": draw(st.integers(0, 2**16)),
    }


def _spread(folder: Folder, keys: dict[str, Entry], count: int, offset: int) -> None:
    for at, (key, entry) in enumerate(keys.items()):
        name = f"model-{at % count + 1 + offset:05d}-of-00009.safetensors"
        folder.shards.setdefault(name, {})[key] = entry


def _config(layout: dict[str, Any]) -> dict[str, Any]:
    if layout["kind"] == "dense":
        return tiny_qwen3_5(tied=layout["tied"])
    return CONFIGS[layout["kind"]]()


def _base(layout: dict[str, Any], root: Path) -> Path:
    config = _config(layout)
    folder = headless(config, dtype=layout["dtype"])
    trunk = {k: e for shard in folder.shards.values() for k, e in shard.items()}
    stored = QUANTISED.get(str(layout["scheme"]).split("-")[0], ({}, ""))[0]
    stem = "model.language_model." if "text_config" in config else "model."
    trunk |= {f"{stem}layers.1.mlp.shared_expert.down_proj.{part}": entry for part, entry in stored.items()}
    folder.shards = {}
    _spread(folder, trunk, layout["base_shards"], 0)
    if layout["old"] != "none":
        old = checkpoint(config).shards["model-00002-of-00002.safetensors"]
        old["mtp.fc.weight_scale_inv"] = ("F32", (1, 1))
        _spread(folder, old, 2, 0 if layout["old"] == "shared shards" else 6)
    declared, beside = schemes.declarations().get(layout["scheme"], (None, None))
    if declared is not None:
        folder.config["quantization_config"] = declared
    if beside is not None:
        folder.extra["hf_quant_config.json"] = beside
    if not layout["index"]:
        folder.index = None
    return write(folder, root, layout["seed"])


def _donor(layout: dict[str, Any], root: Path) -> Path:
    folder = checkpoint(_config(layout), experts=layout["experts"], prefix=layout["prefix"], dtype=layout["dtype"])
    head = folder.shards.pop("model-00002-of-00002.safetensors")
    _spread(folder, head, layout["head_shards"], 5)
    return write(folder, root, layout["seed"] + 1)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(layout=layouts())
def test_merge_then_extract_is_the_identity(layout: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        base, donor = _base(layout, root / "base"), _donor(layout, root / "donor")
        before = {**digest(base), **{f"donor/{k}": v for k, v in digest(donor).items()}}
        options = MergeOptions(link=layout["link"], replace=layout["old"] != "none", experts=layout["experts"])
        carry_out(plan_merge(open_checkpoint(base), open_checkpoint(donor), root / "out", options))
        carry_out(plan_extract(open_checkpoint(root / "out"), root / "head"))
        assert {**digest(base), **{f"donor/{k}": v for k, v in digest(donor).items()}} == before

        bare = {k.removeprefix(layout["prefix"]): v for k, v in head_of(read(donor)).items()}
        out = read(root / "out")
        assert read(root / "head") == bare
        assert head_of(out) == bare
        assert trunk_of(out) == trunk_of(read(base))
        # What lies in the folder is what the index names: nothing of the old head is left for an engine to find.
        listed = json.loads((root / "out" / "model.safetensors.index.json").read_text())
        assert set(listed["weight_map"].values()) == {p.name for p in (root / "out").glob("*.safetensors")}
        assert listed["metadata"]["total_size"] == sum(len(raw) for _, _, raw in out.values())

        # A head folder merges as a whole checkpoint does, and no engine sees it as quantised.
        carry_out(plan_merge(open_checkpoint(base), open_checkpoint(root / "head"), root / "again", options))
        assert digest(root / "again") == digest(root / "out")
        if layout["scheme"] is not None and layout["kind"] != "next":
            config = json.loads((root / "out" / "config.json").read_text())
            beside = root / "out" / "hf_quant_config.json"
            for module in schemes.runtime_modules(layout["kind"] == "moe"):
                answers = schemes.exempted(
                    layout["scheme"], config, json.loads(beside.read_text()) if beside.exists() else None, module
                )
                assert set(answers.values()) == {True}, (module, answers)


SIZES = {"hidden": 32, "vocab": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "experts": 3, "inter": 48}
"""Symbolic dimension -> size in `family_config`; 8 for all others."""


def family_config(family: Family) -> dict[str, Any]:
    """A small config.json of a family that gives every dimension any family asks for, and declares one head layer."""
    config: dict[str, Any] = {"model_type": family.model_types[0], "architectures": [family.architectures[0]]}
    nested = any(p.startswith("text_config.") for p in family.layer_count[:1])
    inner = config.setdefault("text_config", {}) if nested else config
    inner |= {spellings[0]: SIZES.get(name, 8) for name, spellings in ALIASES.items()}
    if family.layer_count:
        head, _, rest = family.layer_count[0].partition(".")
        config |= {head: {**config.get(head, {}), rest: 1}} if rest else {head: 1}
    return config


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_a_random_head_of_every_family_comes_back_byte_for_byte(family: Family, tmp_path: Path) -> None:
    config = family_config(family)
    dims = family_geometry(family, config)
    storage = "split" if any(s.experts == "split" for s in family.head) else "grouped"
    head: dict[str, Entry] = {
        key: ("BF16", tuple(8 if n < 0 else n for n in shape))  # a size that the contract does not pin
        for _, key, shape, spec in family.expected(dims, 1, experts=storage)
        if not spec.optional
    }
    assert len(head) > 4
    shards: dict[str, dict[str, Entry]] = {
        "a.safetensors": {"model.embed_tokens.weight": ("BF16", (64, 32))},
        "b.safetensors": {f"model.layers.{i}.input_layernorm.weight": ("BF16", (32,)) for i in range(3)},
    }
    base = write(Folder(config, shards), tmp_path / "base", 2)
    donor = write(Folder(config, {**shards, "c.safetensors": head}), tmp_path / "donor", 1)
    opened = open_checkpoint(base), open_checkpoint(donor)
    carry_out(plan_merge(*opened, tmp_path / "out", MergeOptions(experts=storage)))
    carry_out(plan_extract(open_checkpoint(tmp_path / "out"), tmp_path / "head"))
    source = read(donor)
    assert read(tmp_path / "head") == {k: source[k] for k in head}
    assert read(tmp_path / "out") == {**read(base), **{k: source[k] for k in head}}
