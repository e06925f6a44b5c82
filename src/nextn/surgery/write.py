"""Carry out a plan: everything into a folder beside OUT, flushed to disk, then one rename.

OUT is there complete or not at all. The folder is locked while its writer lives (flock, which a killed process
loses), so that the next run can tell a leftover from a neighbour's work and remove it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
from pathlib import Path

from nextn.errors import NextnError
from nextn.surgery.plan import Link, Part, Plan, Shard, Text
from nextn.surgery.stream import Advance, copy_range, write_shard


def quiet(moved_bytes: int) -> None:
    """No progress shown."""


def write(plan: Plan, advance: Advance = quiet) -> dict[str, str]:
    """Make `plan.out` appear.

    Returns:
        key -> sha256 of the head tensors' source bytes, where the plan wants them hashed.
    Raises:
        NextnError: OUT exists, the disk is full, a link cannot be made, a source is damaged. OUT is then not there.
    """
    refuse_existing(plan.out)
    out = plan.out.absolute()
    try:
        sweep(out)
        stage, lock = _stage(out)
    except OSError as error:
        raise disk_error(error, out.parent) from None
    try:
        hashes = _fill(stage, plan, advance)
        _flush_folders(stage)
        refuse_existing(plan.out)
        os.rename(stage, out)
        with contextlib.suppress(OSError):  # OUT is there and whole; only a power cut could still undo the rename.
            flush_folder(out.parent)
        return hashes
    except OSError as error:
        raise disk_error(error, out) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        os.close(lock)


def refuse_existing(out: Path) -> None:
    """Raises NextnError where OUT is there already or has no folder to stand in."""
    if os.path.lexists(out):
        raise NextnError(f"{out} exists already.", "Name a folder that does not exist, or remove it first.")
    if not out.absolute().parent.is_dir():
        raise NextnError(f"The folder {out.absolute().parent} does not exist.", "Create it, or name another OUT.")


def sweep(out: Path) -> None:
    """Remove what killed runs left beside OUT. A folder whose writer lives is locked and stays."""
    for leftover in out.parent.glob(f".{glob.escape(out.name)}.nextn-*"):
        try:
            folder = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(folder)


def _stage(out: Path) -> tuple[Path, int]:
    """A new locked folder beside OUT, and the descriptor that holds the lock."""
    while True:
        stage = out.parent / f".{out.name}.nextn-{os.getpid()}-{os.urandom(4).hex()}"
        os.mkdir(stage)
        try:
            lock = os.open(stage, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return stage, lock
        os.close(lock)


def _fill(stage: Path, plan: Plan, advance: Advance) -> dict[str, str]:
    for link in plan.links:
        place_link(stage, link, advance)
    hashes: dict[str, str] = {}
    for shard in plan.shards:
        hashes |= place_shard(stage, shard, advance)
    for text in plan.texts:
        place_text(stage, text, hashes)
    return hashes


def place_link(folder: Path, link: Link, advance: Advance) -> None:
    """Take a file over: the same inode, a symbolic link, or a copy."""
    target = folder / link.file
    target.parent.mkdir(parents=True, exist_ok=True)
    if link.mode == "hard":
        os.link(link.source, target)
    elif link.mode == "symlink":
        os.symlink(link.source, target)
    else:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            copy_range(descriptor, Part(link.source, 0, link.nbytes, "U8"), advance)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def place_shard(folder: Path, shard: Shard, advance: Advance) -> dict[str, str]:
    """Write a safetensors file and flush it; returns the hashes asked for."""
    descriptor = os.open(folder / shard.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        hashes = write_shard(descriptor, shard, advance)
        os.fsync(descriptor)
        return hashes
    finally:
        os.close(descriptor)


def place_text(folder: Path, text: Text, hashes: dict[str, str]) -> None:
    """Write a small file and flush it."""
    raw = text.content if isinstance(text.content, bytes) else text.content(hashes)
    descriptor = os.open(folder / text.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        view = memoryview(raw)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folders(stage: Path) -> None:
    for folder, _, _ in os.walk(stage):
        flush_folder(Path(folder))


def flush_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(error: OSError, where: Path) -> NextnError:
    """What the file system said, in the user's words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NextnError(f"The disk that holds {where.parent} is full; nothing was changed.", "Make room and repeat.")
    if error.errno == errno.EFBIG:
        return NextnError(
            f"{where} would hold a file larger than this system lets you write; nothing was changed.",
            "Raise the limit (`ulimit -f unlimited`), or choose a file system for large files.",
        )
    if error.errno == errno.EXDEV:
        return NextnError(
            f"{where} is on another file system than the base, so that hard links cannot join them.",
            "Choose --link symlink (the base must then stay where it is) or --link copy.",
        )
    if error.errno in (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
        return NextnError(
            f"A link could not be made under {where.parent}: {error.strerror}.",
            "Choose --link symlink or --link copy.",
        )
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return NextnError(f"{where} appeared while it was being written.", "Name another OUT.")
    return NextnError(f"{error.filename or where}: {error.strerror}.", "Check the path and its permissions.")
