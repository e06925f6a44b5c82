"""Small checkpoints with random weights, and what tests compare them by: bytes read through the safetensors library's
own format, not through the code under test."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.fixtures import HEAD_SHARD, TRUNK_SHARD, Folder, checkpoint

Bytes = dict[str, tuple[str, tuple[int, ...], bytes]]
"""key -> (dtype, shape, data)."""


def tiny_qwen3_5(hidden: int = 32, layers: int = 3, *, tied: bool = True, mtp: int | None = 1) -> dict[str, Any]:
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": tied,
        "mtp_use_dedicated_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }
    if mtp is not None:
        text["mtp_num_hidden_layers"] = mtp
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "bfloat16",
        "tie_word_embeddings": tied,
        "text_config": text,
    }


def tiny_qwen3_5_moe(hidden: int = 32, experts: int = 4, *, tied: bool = False) -> dict[str, Any]:
    config = tiny_qwen3_5(hidden, tied=tied)
    config["model_type"], config["architectures"] = "qwen3_5_moe", ["Qwen3_5MoeForConditionalGeneration"]
    del config["text_config"]["intermediate_size"]
    config["text_config"] |= {
        "model_type": "qwen3_5_moe_text",
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    return config


def tiny_qwen3_next(hidden: int = 32, experts: int = 4) -> dict[str, Any]:
    text = tiny_qwen3_5_moe(hidden, experts)["text_config"]
    del text["mtp_num_hidden_layers"], text["mtp_use_dedicated_embeddings"]
    return {**text, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "intermediate_size": 48}


def write(folder: Folder, root: Path, seed: int = 0) -> Path:
    """Write a folder and fill it: floats near one where the dtype is a plain float, any bytes elsewhere."""
    folder.write(root)
    random = np.random.default_rng(seed)
    for name in folder.shards:
        with (root / name).open("r+b") as file:
            header = _header(file.read(8), file)
            start = file.tell()
            for key, entry in header.items():
                if key == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                file.seek(start + begin)
                file.write(_random(random, entry["dtype"], end - begin))
    return root


def _random(random: np.random.Generator, dtype: str, nbytes: int) -> bytes:
    if dtype == "BF16":
        bits = random.standard_normal(nbytes // 2).astype("<f4").view("<u4") >> 16
        return bits.astype("<u2").tobytes()
    if dtype in ("F16", "F32", "F64"):
        kind = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]
        return random.standard_normal(nbytes // int(kind[2])).astype(kind).tobytes()
    if dtype == "F8_E4M3":
        return (
            random.integers(0, 0x7F, nbytes, dtype=np.uint8) | (random.integers(0, 2, nbytes, np.uint8) << 7)
        ).tobytes()
    return random.bytes(nbytes)


def _header(first: bytes, file: Any) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(file.read(struct.unpack("<Q", first)[0]))
    return header


def read(root: Path) -> Bytes:
    """Every tensor of every safetensors file that a folder's index names (of all files where there is none)."""
    index = root / "model.safetensors.index.json"
    names = sorted({*json.loads(index.read_text())["weight_map"].values()}) if index.exists() else None
    out: Bytes = {}
    for path in [root / n for n in names] if names else sorted(root.glob("*.safetensors")):
        with path.open("rb") as file:
            header = _header(file.read(8), file)
            body = file.read()
        for key, entry in header.items():
            if key != "__metadata__":
                assert key not in out, f"{key} is in two files"
                begin, end = entry["data_offsets"]
                out[key] = (entry["dtype"], tuple(entry["shape"]), body[begin:end])
    return out


def digest(root: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file below a folder, with a mark for symbolic links."""
    return {
        p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def is_head(key: str) -> bool:
    return ".mtp" in f".{key}"


def head_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in tensors.items() if is_head(k)}


def trunk_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in tensors.items() if not is_head(k)}


def headless(config: Mapping[str, Any], **options: Any) -> Folder:
    """A clean checkpoint that lost its head: the target in one shard, another target shard in place of the head's."""
    folder = checkpoint(config, **options)
    body = folder.shards[TRUNK_SHARD]
    last = list(body)[-1]
    folder.shards[HEAD_SHARD] = {last: body.pop(last)}
    return folder
