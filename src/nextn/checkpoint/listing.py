"""What a checkpoint holds, as a value: tensors from the headers, and the index beside them as a claim.

`assemble` is the one place where headers meet the index, for local, cached and remote files alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from nextn.checkpoint.jsonfile import parse_object, read_json
from nextn.checkpoint.tensors import TensorInfo
from nextn.errors import NextnError

INDEX_NAME = "model.safetensors.index.json"
MAX_FILES = 20_000

Header = tuple[dict[str, TensorInfo], dict[str, str]]
"""What one file's header gives: tensors by key, and ``__metadata__``."""


@dataclass(slots=True)
class Remote:
    """How a hub repository was listed; the counts go on as further files are read.

    Attributes:
        repo: hub repository id.
        commit: the commit that was listed, or the revision asked for where the hub names none.
        endpoint: address of the hub.
        requests: HTTP requests made, redirects not counted.
        bytes_read: bytes of bodies received.
    """

    repo: str
    commit: str
    endpoint: str
    requests: int = 0
    bytes_read: int = 0


@dataclass
class Checkpoint:
    """A checkpoint, listed.

    Attributes:
        source: what the user named.
        root: the local folder, or None where the files are remote.
        config: config.json, {} where there is none.
        tensors: key -> tensor, from the headers. A key that several files hold is listed for the file that the
            index names, else for the last file in name order.
        files: weight files present (unreadable ones included), in name order.
        index: key -> file name as the index claims, or None without a readable index.
        absent_files: files that the index (or the numbering of a split GGUF) names and that are not there.
        duplicates: key -> all files that hold it, for keys in more than one file.
        metadata: file -> the header's ``__metadata__``.
        kind: format of the weights.
        gguf: metadata of a GGUF; a list of more than 64 values is replaced by ``{"length": n}``.
        unreadable: file -> what is wrong with it, for weight files and the index; nothing of it is listed.
        unindexed_files: files present that the index does not name.
        unindexed_keys: keys in the headers that the index does not list.
        misplaced: index entries whose key is not in the file that they name, though that file is there and readable.
        name: what nextn's own commands call it where that is neither its folder nor its repository; None otherwise.
        beside: other weight files of the folder or repository, where one file of it was named.
        remote: how a hub repository was listed; None for local files and for the hub's cache without a connection.
        read_remote: reads a small remote file whole; None where it is absent.
        read_range: reads (file, start, length) of a remote file; None for local ones.
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
    kind: Literal["safetensors", "gguf"] = "safetensors"
    gguf: dict[str, Any] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    unindexed_files: tuple[str, ...] = ()
    unindexed_keys: tuple[str, ...] = ()
    misplaced: dict[str, str] = field(default_factory=dict)
    name: str | None = None
    beside: tuple[str, ...] = ()
    remote: Remote | None = None
    read_remote: Callable[[str], bytes | None] | None = field(default=None, repr=False, compare=False)
    read_range: Callable[[str, int, int], bytes] | None = field(default=None, repr=False, compare=False)

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the checkpoint, None where it is absent. Raises NextnError where it is not an object."""
        if self.root is not None:
            path = self.root / name
            return read_json(path) if path.is_file() else None
        raw = self.read_remote(name) if self.read_remote else None
        return None if raw is None else parse_object(raw, name)


def index_entries(index: Mapping[str, Any]) -> dict[str, str]:
    """The weight_map of an index file. Raises NextnError where it is missing, of another form, or absurdly long."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise NextnError("The index holds no weight_map from keys to file names.", "Download or export it again.")
    if len(set(weight_map.values())) > MAX_FILES:
        raise NextnError(f"The index names over {MAX_FILES} files.", "Download or export it again.")
    return weight_map


def refuse_outside(index: Mapping[str, str]) -> None:
    """Raise NextnError where an index names a file outside the checkpoint's folder."""
    for name in set(index.values()):
        if not inside(name):
            raise NextnError(
                f"The index names the file {name[:80]!r}, which lies outside the checkpoint's folder.",
                "Do not use this checkpoint unless you trust its origin; correct the index.",
            )


def inside(name: str) -> bool:
    """Whether a relative file name from a checkpoint stays in its folder: ``a/b.safetensors`` does, ``../b`` not."""
    path = PurePosixPath(name)
    parts = path.parts
    return bool(parts) and not path.is_absolute() and ".." not in parts and not re.search(r"[\\\x00]|^[A-Za-z]:", name)


def assemble(
    source: str,
    root: Path | None,
    config: dict[str, Any],
    headers: Mapping[str, Header],
    *,
    files: tuple[str, ...],
    index: dict[str, str] | None,
    unreadable: dict[str, str],
) -> Checkpoint:
    """Put the headers of safetensors files and the index together.

    Args:
        headers: file name -> its header, for the files that could be read, in name order.
        files: all weight files present.
        index: the index's weight_map, None without one.
        unreadable: what is wrong with files that could not be read.
    """
    tensors: dict[str, TensorInfo] = {}
    holders: dict[str, list[str]] = {}
    for name, (found, _) in headers.items():
        for key, info in found.items():
            holders.setdefault(key, []).append(name)
            if key not in tensors or index is None or index.get(key) != tensors[key].file:
                tensors[key] = info
    checkpoint = Checkpoint(
        source,
        root,
        config,
        tensors,
        files=files,
        index=index,
        duplicates={k: tuple(v) for k, v in holders.items() if len(v) > 1},
        metadata={name: metadata for name, (_, metadata) in headers.items()},
        unreadable=unreadable,
    )
    if index is not None:
        present, named = set(files), set(index.values())
        checkpoint.absent_files = tuple(sorted(named - present))
        checkpoint.unindexed_files = tuple(name for name in files if name not in named)
        checkpoint.unindexed_keys = tuple(key for key in tensors if key not in index)
        checkpoint.misplaced = {k: f for k, f in index.items() if f in headers and k not in headers[f][0]}
    return checkpoint
