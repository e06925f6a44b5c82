"""Write the checkpoint folder that a GGUF file stands for: whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from nextn.checkpoint.save import save_tensors
from nextn.convert.llama_gguf import LlamaFile
from nextn.convert.tokenizer import tokenizer_files
from nextn.errors import NextnError


def write_folder(source: Path, out: Path) -> None:
    """config.json, generation_config.json, model.safetensors in bfloat16, tokenizer.json, tokenizer_config.json.

    The weights are held in memory once. Where another process finishes first, its folder stays.

    Args:
        source: a Llama-architecture GGUF file.
        out: a folder that does not exist; its parent does.
    Raises:
        NextnError: a file that cannot be understood, or no room for the folder.
    """
    file = LlamaFile(source)
    config = file.config()
    tokenizer, settings = tokenizer_files(file.values, source.name)
    weights = file.weights(config)
    stage = None
    try:
        stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        stage.chmod(0o755)
        save_tensors(stage / "model.safetensors", weights)
        (stage / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        ends = {name: value for name, value in config.items() if name in ("bos_token_id", "eos_token_id")}
        for name, value in (("tokenizer_config", settings), ("generation_config", ends), ("config", config)):
            text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
            (stage / f"{name}.json").write_text(text, encoding="utf-8")
        os.rename(stage, out)
    except (OSError, SafetensorError) as error:
        if not (out / "config.json").is_file():
            raise NextnError(
                f"{out} cannot be written: {getattr(error, 'strerror', None) or error}.",
                "Make room, or name another folder.",
            ) from None
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
