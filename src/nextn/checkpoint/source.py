"""Open a checkpoint: a folder, a single file or a hub repository, listed by its headers.

`open_checkpoint` is the one way in. What is listed is what the files hold; the index is kept beside it as a claim.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nextn.checkpoint.gguf import read_gguf, split_names
from nextn.checkpoint.header import read_header
from nextn.checkpoint.jsonfile import read_json as read_json
from nextn.checkpoint.listing import INDEX_NAME as INDEX_NAME
from nextn.checkpoint.listing import Checkpoint as Checkpoint
from nextn.checkpoint.listing import Header, assemble, index_entries, refuse_outside
from nextn.errors import NextnError
from nextn.smollm2 import NAME, smollm2_folder

Progress = Callable[[int, int], None]
"""Called with (files listed, files in all)."""

REPO_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?:/([\w./-]+\.(?:gguf|safetensors)))?")


def open_checkpoint(
    source: str | Path, *, revision: str | None = None, token: str | None = None, progress: Progress | None = None
) -> Checkpoint:
    """List a checkpoint without reading its weights.

    Args:
        source: a folder of safetensors files or of one GGUF; a .safetensors file; a GGUF file, whole or one piece of a
            split one; ``smollm2`` (`nextn.smollm2`); a hub repository ``org/name``, or one file of it:
            ``org/name/file.gguf``.
        revision: branch, tag or commit of a hub repository.
        token: hub token; the one that huggingface_hub finds if None.
        progress: for hub repositories, called as headers arrive.
    Raises:
        NextnError: nothing there, or nothing that can be understood.
    """
    path = Path(source)
    try:
        if path.is_dir():
            return open_folder(path)
        if path.is_file():
            return open_file(path)
        if str(source) == NAME:
            return replace(open_folder(smollm2_folder()), name=NAME)
        there = path.is_symlink() or path.exists()
    except OSError as error:
        raise NextnError(f"{source} cannot be read: {error.strerror}.", "Check the path and its permissions.") from None
    match = REPO_ID.fullmatch(str(source))
    if there or not match or str(source).startswith("."):
        raise NextnError(
            f"{str(source)[:200]} is neither a folder nor a checkpoint file.",
            "Name a folder, a .safetensors or .gguf file, or a hub repository as org/name.",
        )
    from nextn.checkpoint.hub import open_repo

    return open_repo(match[1], match[2], revision=revision, token=token, progress=progress)


def open_folder(root: Path) -> Checkpoint:
    """List a local folder: its safetensors files, or the one GGUF that it holds where it has none of those."""
    index, unreadable = _read_index(root / INDEX_NAME)
    files, broken = _weight_files(root, "safetensors")
    nested = {f for f in set((index or {}).values()) if "/" in f and _is_file(root / f)}
    files = tuple(sorted({*files, *nested}))
    config_path = root / "config.json"
    if not files and not broken and index is None:
        ggufs = _weight_files(root, "gguf")[0]
        if ggufs:
            return open_gguf(root / one_gguf(ggufs, str(root)), str(root))
        if not config_path.is_file():
            raise _nothing(root)
    config = read_json(config_path) if config_path.is_file() else {}
    headers: dict[str, Header] = {}
    with collection_paused():
        for name in files:
            try:
                headers[name] = read_header(root / name, name)
            except NextnError as error:
                unreadable[name] = error.what
    if files and not headers:
        raise NextnError(f"No weight file of {root} can be read: {unreadable[files[0]]}", "Download it again.")
    unreadable |= broken
    return assemble(str(root), root, config, headers, files=files, index=index, unreadable=unreadable)


def _nothing(root: Path) -> NextnError:
    """Why a folder is no checkpoint. That of a run of `nextn train` is one only once the head is exported."""
    above = root.absolute().parents
    if _is_file(root / "run.json") or next(root.glob("step-*/run.json"), None):
        run = above[1] if _is_file(root / "run.json") else above[0]
        return NextnError(
            f"{root} is what a run of `nextn train` resumes from, not a checkpoint with a head.",
            f"Name the folder of the run, {run}: its head is there once the run has ended.",
        )
    if next(root.glob("checkpoints/step-*/run.json"), None) or _is_file(root / "logs" / "log.jsonl"):
        return NextnError(
            f"{root} is the folder of a run of `nextn train` that has exported no head.",
            "Run its command again: it goes on where it was and exports a head at the end, with keep_best=false in any"
            " case.",
        )
    return NextnError(f"{root} holds neither config.json nor weights.", "Name the folder of a checkpoint.")


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection while many small values are built: it doubles the time of large listings."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def open_file(path: Path) -> Checkpoint:
    """List one safetensors file (with the config.json beside it, if any) or one GGUF with its other pieces."""
    if path.suffix != ".safetensors":
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == b"GGUF" or path.suffix == ".gguf":
            return open_gguf(path, str(path))
        raise NextnError(f"{path} is neither a safetensors nor a GGUF file.", "Name a checkpoint.")
    config_path = path.parent / "config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    headers = {path.name: read_header(path, path.name)}
    opened = assemble(str(path), path.parent, config, headers, files=(path.name,), index=None, unreadable={})
    opened.beside = tuple(name for name in _weight_files(path.parent, "safetensors")[0] if name != path.name)
    return opened


def open_gguf(path: Path, source: str) -> Checkpoint:
    """List a GGUF file and, where its name says that it is one piece of several, the others."""
    names = split_names(path.name)
    present = tuple(name for name in names if _is_file(path.parent / name))
    headers: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    unreadable: dict[str, str] = {}
    for name in present:
        try:
            headers[name] = read_gguf(path.parent / name, name)
        except NextnError as error:
            if name == path.name:
                raise
            unreadable[name] = error.what
    return assemble_gguf(source, path.parent, headers, names=names, present=present, unreadable=unreadable)


def assemble_gguf(
    source: str,
    root: Path | None,
    headers: dict[str, tuple[dict[str, Any], dict[str, Any]]],
    *,
    names: tuple[str, ...],
    present: tuple[str, ...],
    unreadable: dict[str, str],
) -> Checkpoint:
    """Put the pieces of a GGUF together; metadata of the first piece wins, as in llama.cpp."""
    tables: dict[str, Header] = {name: (tensors, {}) for name, (tensors, _) in headers.items()}
    checkpoint = assemble(source, root, {}, tables, files=present, index=None, unreadable=unreadable)
    metadata: dict[str, Any] = {}
    for _, found in reversed(headers.values()):
        metadata |= found
    return replace(
        checkpoint,
        kind="gguf",
        gguf=metadata,
        metadata={},
        absent_files=tuple(name for name in names if name not in present),
    )


def one_gguf(names: tuple[str, ...], where: str) -> str:
    """The model among several GGUF files (a split one counts once; multimodal projectors do not count).

    Raises:
        NextnError: more than one model.
    """
    models = [n for n in names if "mmproj" not in n.lower()] or list(names)
    groups: dict[tuple[str, ...], str] = {}
    for name in models:
        groups.setdefault(split_names(name), name)
    if len(groups) > 1:
        shown = ", ".join(sorted(groups.values())[:4])
        raise NextnError(f"{where} holds {len(groups)} GGUF models.", f"Name one of them: {shown}, ...")
    return next(iter(groups.values()))


def _read_index(path: Path) -> tuple[dict[str, str] | None, dict[str, str]]:
    """The index's weight_map and what is wrong with it; an index that cannot be understood is a fact, not an error."""
    if not _is_file(path):
        return None, {}
    try:
        index = index_entries(read_json(path))
    except NextnError as error:
        return None, {path.name: error.what}
    refuse_outside(index)
    return index, {}


def _weight_files(root: Path, suffix: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of the files with a suffix, and those that are no regular files with the reason."""
    files, broken = [], {}
    for path in root.glob(f"*.{suffix}"):
        if _is_file(path):
            files.append(path.name)
        elif path.is_symlink():
            broken[path.name] = f"{path.name} is a link that leads nowhere."
    return tuple(sorted(files)), broken


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False
