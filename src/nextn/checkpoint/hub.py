"""List a hub repository by reading headers only: one range request a shard, as long as its index lets foresee.

huggingface_hub gives token, endpoint, cache and session; it is imported when a repository is named. A snapshot in
the local cache is read instead where it holds every weight file of the commit, and where there is no connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nextn.checkpoint.gguf import parse_gguf, split_names
from nextn.checkpoint.header import header_length, parse_header
from nextn.checkpoint.jsonfile import MAX_JSON_BYTES, parse_object
from nextn.checkpoint.listing import INDEX_NAME, Checkpoint, Header, Remote, assemble, index_entries, refuse_outside
from nextn.checkpoint.source import Progress, assemble_gguf, one_gguf, open_file, open_folder
from nextn.errors import NextnError

FIRST_BYTES = 256 << 10
"""First read of a safetensors file of which the index says nothing."""
ENTRY_BYTES = 112
"""What a tensor takes in a header beside its key: dtype, shape, offsets, punctuation."""
GGUF_FIRST_BYTES = 2 << 20
THREADS = 16
TRIES = 3
DEADLINE_S = 180.0
"""For one request, however slowly its bytes drip."""


class AbsentError(Exception):
    """The hub does not have the file."""


class UnreachableError(NextnError):
    """No connection to the hub."""


@dataclass
class Hub:
    """Range requests against one commit of one repository.

    Attributes:
        facts: what is read, and the counts.
        headers: HTTP headers with the token.
        sizes: file name -> length in bytes; None until the first read where the hub does not list it.
    """

    facts: Remote
    headers: dict[str, str]
    sizes: dict[str, int | None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Up to `length` bytes of a file from `start` on; the whole file, at most 64 MiB, if None.

        Raises:
            AbsentError: the hub does not have the file.
            NextnError: the hub cannot be reached or refuses.
        """
        from huggingface_hub import hf_hub_url

        body, total = self.get(hf_hub_url(self.facts.repo, name, revision=self.facts.commit), start, length)
        if self.sizes.get(name) is None:
            self.sizes[name] = total
        return body

    def get(self, url: str, start: int = 0, length: int | None = None) -> tuple[bytes, int | None]:
        """Body (cut at `length`) and total length of a resource; three tries where trying again can help.

        Raises:
            AbsentError: the hub does not have it.
            NextnError: the hub cannot be reached or refuses.
        """
        from huggingface_hub.errors import HfHubHTTPError

        network_error: type[Exception] = HfHubHTTPError.__bases__[0]  # httpx in huggingface_hub 1, httpx2 in 2
        for attempt in range(1, TRIES + 1):
            try:
                return self._get_once(url, start, length)
            except network_error as error:
                response = getattr(error, "response", None)
                status = response.status_code if response is not None else None
                if status in (None, 408, 429, 500, 502, 503, 504) and attempt < TRIES:
                    time.sleep(0.2 * 2**attempt)
                    continue
                if status == 404 and type(error).__name__ in ("RemoteEntryNotFoundError", "HfHubHTTPError"):
                    raise AbsentError(url) from None
                raise explain(error, status, self.facts) from None
        raise AssertionError("unreachable")

    def _get_once(self, url: str, start: int, length: int | None) -> tuple[bytes, int | None]:
        from huggingface_hub import constants, get_session
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

        headers = {**self.headers, "Accept-Encoding": "identity"}
        if length is not None:
            headers["Range"] = f"bytes={start}-{start + length - 1}"
        limit = MAX_JSON_BYTES if length is None else length
        body, began = bytearray(), time.monotonic()
        with get_session().stream(
            "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
        ) as response:
            with self.lock:
                self.facts.requests += 1
            hf_raise_for_status(response)
            if start and response.status_code != 206:
                raise NextnError(f"{self.facts.endpoint} does not serve parts of files.", "Download the checkpoint.")
            for piece in response.iter_raw(65536):
                body += piece
                if len(body) >= limit:
                    break
                if time.monotonic() - began > DEADLINE_S:
                    raise UnreachableError(f"{self.facts.endpoint} answers too slowly.", "Try again later.")
            whole = response.headers.get("Content-Range", "").rpartition("/")[2]
            if not whole and response.status_code == 200:
                whole = response.headers.get("Content-Length", "")
        with self.lock:
            self.facts.bytes_read += len(body)
        return bytes(body[:limit]), int(whole) if whole.isdecimal() and len(whole) < 19 else None

    def connect(self, revision: str) -> None:
        """List the files of a revision and fix the commit. Raises NextnError."""
        facts = self.facts
        url = f"{facts.endpoint}/api/models/{facts.repo}/revision/{quote(revision, safe='')}?blobs=true"
        try:
            answer = parse_object(self.get(url)[0], f"The hub's answer for {facts.repo}")
        except AbsentError:
            raise explain(FileNotFoundError(), 404, facts) from None
        siblings = answer.get("siblings")
        for entry in siblings if isinstance(siblings, list) else []:
            name, size = (entry.get("rfilename"), entry.get("size")) if isinstance(entry, dict) else (None, None)
            if isinstance(name, str):
                self.sizes[name] = size if type(size) is int and size >= 0 else None
        commit = answer.get("sha")
        facts.commit = commit if isinstance(commit, str) else revision

    def json_bytes(self, name: str) -> bytes | None:
        """A small file whole, None where it is absent."""
        try:
            return self.read(name) if name in self.sizes else None
        except AbsentError:
            return None

    def safetensors_header(self, name: str, first_bytes: int) -> Header:
        """Header of a remote safetensors file. Raises AbsentError, NextnError."""
        start = self.read(name, 0, max(first_bytes, 64))
        size_bytes = self.sizes[name]
        if size_bytes is None:
            raise NextnError(f"The hub does not say how long {name} is.", "Download the checkpoint.")
        length = header_length(start, size_bytes, name)
        if 8 + length > len(start):
            start += self.read(name, len(start), 8 + length - len(start))
        if len(start) < 8 + length:
            raise NextnError(f"{name} ends inside its header.", "It is truncated; download it again.")
        return parse_header(start[8 : 8 + length], size_bytes, name)

    def gguf_header(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors and metadata of a remote GGUF file. Raises AbsentError, NextnError."""
        size_bytes = self.sizes[name]
        if size_bytes is None:
            raise NextnError(f"The hub does not say how long {name} is.", "Download the checkpoint.")
        return parse_gguf(lambda at, n: self.read(name, at, n), size_bytes, name, first_bytes=GGUF_FIRST_BYTES)


def open_repo(
    repo: str,
    file: str | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """List a hub repository, or one file of it.

    Raises:
        NextnError: not found, gated, no such revision, no connection and nothing cached, several GGUF models and none
            named, or nothing that can be understood.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import build_hf_headers, validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise NextnError(f"{repo} is neither a folder nor a valid hub repository id.", "Check the spelling.") from None
    asked = revision or "main"
    snapshot = _snapshot(repo, asked)
    if constants.HF_HUB_OFFLINE:
        if snapshot is None:
            raise NextnError(f"{repo} is not in the local cache and HF_HUB_OFFLINE is set.", "Unset it, or download.")
        return _open_cached(snapshot, repo, file)
    hub = Hub(Remote(repo, asked, constants.ENDPOINT), build_hf_headers(token=token, library_name="nextn"))
    try:
        hub.connect(asked)
    except UnreachableError:
        if snapshot is None:
            raise
        return _open_cached(snapshot, repo, file)
    if file is not None and file not in hub.sizes:
        raise NextnError(f"{repo} holds no file {file}.", "Check the spelling.")
    weights = sorted(n for n in hub.sizes if n.endswith(".safetensors") and "/" not in n)
    ggufs = sorted(n for n in hub.sizes if n.endswith(".gguf"))
    if file is None and not weights and ggufs:
        file = one_gguf(tuple(ggufs), repo)
    wanted = split_names(file) if file else (*weights, "config.json", INDEX_NAME)
    cached = _snapshot(repo, hub.facts.commit)
    if cached is not None and all((cached / name).is_file() for name in wanted if name in hub.sizes):
        return replace(_open_cached(cached, repo, file), remote=hub.facts)
    if file is not None and file.endswith(".gguf"):
        return _open_remote_gguf(hub, file, progress)
    if not weights and file is None and "config.json" not in hub.sizes:
        raise NextnError(f"{repo} holds neither config.json nor weights.", "Name the repository of a language model.")
    opened = _open_remote_safetensors(hub, weights if file is None else [file], file is None, progress)
    opened.beside = tuple(name for name in weights if name != file) if file is not None else ()
    return opened


def _open_remote_safetensors(hub: Hub, files: list[str], whole: bool, progress: Progress | None) -> Checkpoint:
    """Config and index, then all headers in parallel. `whole`: the repository, not one file of it."""
    raw_config = hub.json_bytes("config.json")
    config = parse_object(raw_config, "config.json") if raw_config is not None else {}
    index: dict[str, str] | None = None
    unreadable: dict[str, str] = {}
    raw_index = hub.json_bytes(INDEX_NAME) if whole else None
    if raw_index is not None:
        try:
            index = index_entries(parse_object(raw_index, INDEX_NAME))
        except NextnError as error:
            unreadable[INDEX_NAME] = error.what
    first_bytes: dict[str, int] = {}
    if index is not None:
        refuse_outside(index)
        files = sorted({*files, *(f for f in index.values() if f in hub.sizes)})
        for key, name in index.items():
            first_bytes[name] = first_bytes.get(name, 2048) + len(key) + ENTRY_BYTES
    found, absent = _in_parallel(
        files, lambda name: hub.safetensors_header(name, first_bytes.get(name, FIRST_BYTES)), unreadable, progress
    )
    present = tuple(name for name in files if name not in absent)
    if present and not found:
        raise NextnError(f"No weight file of {hub.facts.repo} can be read: {unreadable[present[0]]}", "Report it.")
    checkpoint = assemble(hub.facts.repo, None, config, found, files=present, index=index, unreadable=unreadable)
    return replace(checkpoint, remote=hub.facts, read_remote=hub.json_bytes, read_range=hub.read)


def _open_remote_gguf(hub: Hub, file: str, progress: Progress | None) -> Checkpoint:
    names = split_names(file)
    unreadable: dict[str, str] = {}
    listed = [name for name in names if name in hub.sizes]
    found, absent = _in_parallel(listed, hub.gguf_header, unreadable, progress)
    if not found:
        raise NextnError(unreadable.get(file, f"{hub.facts.repo} does not serve {file}."), "Report it.")
    present = tuple(name for name in listed if name not in absent)
    checkpoint = assemble_gguf(
        f"{hub.facts.repo}/{file}", None, found, names=names, present=present, unreadable=unreadable
    )
    return replace(checkpoint, remote=hub.facts, read_remote=hub.json_bytes)


def _in_parallel(
    files: list[str],
    read: Callable[[str], tuple[dict[str, Any], dict[str, Any]]],
    unreadable: dict[str, str],
    progress: Progress | None,
) -> tuple[dict[str, tuple[dict[str, Any], dict[str, Any]]], set[str]]:
    """Headers by file, and the files that turned out to be absent; damaged ones go to `unreadable`.

    Raises:
        NextnError: the connection fails, since a report on half of the files would be wrong.
    """
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    absent: set[str] = set()
    with ThreadPoolExecutor(THREADS) as pool:
        futures = {name: pool.submit(read, name) for name in files}
        for done, name in enumerate(files, start=1):
            try:
                found[name] = futures[name].result()
            except AbsentError:
                absent.add(name)
            except UnreachableError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            except NextnError as error:
                unreadable[name] = error.what
            if progress:
                progress(done, len(files))
    return found, absent


def _snapshot(repo: str, revision: str) -> Path | None:
    """Folder of a revision in the hub's local cache, None where it is not there."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    try:
        reference = cache / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else revision
        folder = cache / "snapshots" / commit
        return folder if commit and "/" not in commit and folder.is_dir() else None
    except (OSError, ValueError):
        return None


def _open_cached(snapshot: Path, repo: str, file: str | None) -> Checkpoint:
    if file is None:
        return replace(open_folder(snapshot), source=repo)
    if not (snapshot / file).is_file():
        raise NextnError(f"{file} of {repo} is not in the local cache.", "Connect to the hub, or download it.")
    return replace(open_file(snapshot / file), source=f"{repo}/{file}")


def explain(error: Exception, status: int | None, facts: Remote) -> NextnError:
    """An error of huggingface_hub or its HTTP library, in two sentences."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return NextnError(
            f"{facts.repo} is gated and the hub does not let this token in.",
            f"Ask for access at {facts.endpoint}/{facts.repo}, then log in with `hf auth login` or set HF_TOKEN.",
        )
    if kind == "RevisionNotFoundError":
        return NextnError(f"{facts.repo} has no revision {facts.commit}.", "Check the branch, tag or commit.")
    if kind == "RepositoryNotFoundError" or status in (401, 403, 404):
        return NextnError(
            f"There is no folder {facts.repo} here, and no hub repository of that name that this token may read.",
            "Check the spelling, or log in with `hf auth login` if it is private.",
        )
    if status is not None:
        return UnreachableError(f"{facts.endpoint} answers with status {status}.", "Try again later.")
    reason = "does not answer in time" if "Timeout" in kind else "cannot be reached"
    return UnreachableError(f"{facts.endpoint} {reason}.", "Check the connection, or name a local folder.")
