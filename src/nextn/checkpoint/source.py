"""Open a checkpoint: a folder, a hub repository or a single file, listed by its headers.

`open_checkpoint` is the one way in. What is listed is what the files hold; the index is kept beside it as a claim.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nextn.checkpoint.header import read_header
from nextn.checkpoint.tensors import TensorInfo
from nextn.errors import NextnError

MAX_JSON_BYTES = 64 << 20
INDEX_NAME = "model.safetensors.index.json"


@dataclass
class Checkpoint:
    """A checkpoint, listed.

    Attributes:
        source: what the user named.
        root: the local folder, or None where the files are remote.
        config: config.json, {} where there is none.
        tensors: key -> tensor, from the headers. A key that several files hold is listed for the file that the
            index names, else for the last file in name order.
        files: safetensors files present, in name order.
        index: key -> file name as the index claims, or None without an index.
        absent_files: files that the index names and that are not there.
        duplicates: key -> all files that hold it, for keys in more than one file.
        metadata: file -> the header's ``__metadata__``.
        json_files: further JSON files by name (generation_config.json, hf_quant_config.json, ...), loaded on demand.
    """

    source: str
    root: Path | None
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: tuple[str, ...] = ()
    index: dict[str, str] | None = None
    absent_files: tuple[str, ...] = ()
    duplicates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the checkpoint, None where it is absent. Raises NextnError where it is not an object."""
        assert self.root is not None
        path = self.root / name
        return read_json(path) if path.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises NextnError when unreadable, over 64 MiB, or not an object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise NextnError(f"{path} is over {MAX_JSON_BYTES >> 20} MiB.", "That is no configuration file.")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise NextnError(f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions.") from None
    except (ValueError, RecursionError):
        raise NextnError(f"{path} is not valid JSON.", "Correct or download it again.") from None
    if not isinstance(value, dict):
        raise NextnError(f"{path} does not hold a JSON object.", "Correct or download it again.")
    return value


def open_checkpoint(source: str | Path, *, revision: str | None = None, token: str | None = None) -> Checkpoint:
    """List a checkpoint without reading its weights.

    Raises:
        NextnError: nothing there, or a file that cannot be understood.
    """
    path = Path(source)
    if path.is_dir():
        return open_folder(path)
    raise NextnError(f"{source} is not a folder.", "Name a folder that holds config.json and safetensors files.")


def open_folder(root: Path) -> Checkpoint:
    """List a local folder of safetensors files."""
    config_path = root / "config.json"
    if not config_path.is_file():
        raise NextnError(f"{root} holds no config.json.", "Name the folder of a checkpoint.")
    config = read_json(config_path)
    files = tuple(sorted(p.name for p in root.glob("*.safetensors") if p.is_file()))
    index: dict[str, str] | None = None
    if (root / INDEX_NAME).is_file():
        weight_map = read_json(root / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise NextnError(f"{root / INDEX_NAME} holds no weight_map.", "Download or export it again.")
        index = weight_map
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, dict[str, str]] = {}
    holders: dict[str, list[str]] = {}
    for name in files:
        found, metadata[name] = read_header(root / name, name)
        for key, info in found.items():
            holders.setdefault(key, []).append(name)
            if key not in tensors or index is None or index.get(key) != tensors[key].file:
                tensors[key] = info
    absent = tuple(sorted({f for f in (index or {}).values() if f not in files}))
    duplicates = {k: tuple(v) for k, v in holders.items() if len(v) > 1}
    return Checkpoint(str(root), root, config, tensors, files, index, absent, duplicates, metadata)
