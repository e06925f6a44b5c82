"""Write a trained decoder as a checkpoint folder in the published Qwen3.5 layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from nextn.models.decoder import Decoder
from nextn.models.save import decoder_state
from recipes.tiny.tokenizer import END_OF_TEXT, TURN_END


def export(model: Decoder, config: dict[str, Any], tokenizer: Path, out: Path) -> Path:
    """config.json, generation_config.json, bf16 model.safetensors and the tokenizer's files.

    Args:
        config: config.json as it shall be written.
        tokenizer: folder with tokenizer.json and tokenizer_config.json.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stops = [Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id(t) for t in (END_OF_TEXT, TURN_END)]
    generation = {
        "eos_token_id": stops,
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)
    state = decoder_state(model, config, dtype=torch.bfloat16)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out
