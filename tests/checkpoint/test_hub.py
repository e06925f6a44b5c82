"""Hub repositories against a local HTTP server: ranges, redirects, an absent shard, slow and refused answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gguf
import numpy as np
import pytest
from huggingface_hub import close_session, constants

from nextn.checkpoint import hub
from nextn.checkpoint.source import open_checkpoint
from nextn.errors import NextnError
from tests.checkpoint.sparse_files import write_index, write_sparse

REPO = "org/name"


class Server(ThreadingHTTPServer):
    """Serves a folder as a repository. `seen` holds (path, Range, Authorization) of each request."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.seen: list[tuple[str, str | None, str | None]] = []
        self.gone: set[str] = set()
        self.delay_s = 0.0
        self.ranges = True
        self.status: tuple[int, str] | None = None
        self.failures_left = 0
        self.commit = "0" * 40


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        server, path = self.server, urlsplit(self.path).path
        server.seen.append((path, self.headers.get("Range"), self.headers.get("Authorization")))
        time.sleep(server.delay_s)
        if server.failures_left:
            server.failures_left -= 1
            return self.answer(503)
        if server.status:
            return self.answer(server.status[0], X_Error_Code=server.status[1])
        if path.startswith("/api/models/"):
            names = sorted(p.relative_to(server.root).as_posix() for p in server.root.rglob("*") if p.is_file())
            files = [{"rfilename": n, "size": (server.root / n).stat().st_size} for n in names]
            return self.answer(200, json.dumps({"sha": server.commit, "siblings": files}).encode())
        if path.startswith(f"/{REPO}/resolve/"):
            name = path.split("/resolve/")[1].partition("/")[2]
            if name in server.gone:
                return self.answer(404, X_Error_Code="EntryNotFound")
            return self.answer(302, Location=f"/cdn/{name}")
        body = (server.root / path.removeprefix("/cdn/")).read_bytes()
        asked = self.headers.get("Range")
        if asked is None or not server.ranges:
            return self.answer(200, body)
        first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
        part = body[first : last + 1]
        return self.answer(206, part, Content_Range=f"bytes {first}-{first + len(part) - 1}/{len(body)}")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    root = tmp_path / "repository"
    root.mkdir()
    server = Server(root)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 2)
    monkeypatch.chdir(tmp_path)
    close_session()
    yield server
    server.shutdown()
    server.server_close()
    close_session()


def fill(root: Path, shards: int = 8) -> None:
    (root / "config.json").write_text('{"model_type": "llama"}')
    weight_map = {}
    for shard in range(shards):
        tensors = {f"model.layers.{shard}.mlp.experts.{i}.up_proj.weight": ("BF16", (64, 128)) for i in range(40)}
        write_sparse(root / f"model-{shard}.safetensors", tensors)
        weight_map |= dict.fromkeys(tensors, f"model-{shard}.safetensors")
    write_index(root, weight_map)


def test_same_listing_as_the_folder_with_one_request_a_shard(server: Server) -> None:
    fill(server.root)
    (server.root / "hf_quant_config.json").write_text('{"quantization": {}}')
    seen: list[tuple[int, int]] = []
    remote = open_checkpoint(REPO, progress=lambda done, total: seen.append((done, total)))
    local = open_checkpoint(server.root)
    for name in ("config", "tensors", "files", "index", "absent_files", "unindexed_files", "metadata", "unreadable"):
        assert getattr(remote, name) == getattr(local, name), name
    assert remote.root is None
    assert seen == [(n, 8) for n in range(1, 9)]
    shard_requests = [path for path, asked, _ in server.seen if "resolve" in path and asked]
    assert sorted(shard_requests) == [f"/{REPO}/resolve/{server.commit}/model-{n}.safetensors" for n in range(8)]
    assert remote.remote is not None
    assert remote.remote.requests == 1 + 2 + 8
    weights = sum((server.root / f).stat().st_size for f in local.files)
    assert 8 * 40 * 100 < remote.remote.bytes_read < weights / 10
    assert remote.json("hf_quant_config.json") == {"quantization": {}}
    assert remote.json("no.json") is None
    assert remote.remote.requests == 12


def test_a_header_longer_than_the_first_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(server.root, 1)
    (server.root / "model.safetensors.index.json").unlink()
    monkeypatch.setattr(hub, "FIRST_BYTES", 100)
    remote = open_checkpoint(REPO)
    assert remote.tensors == open_checkpoint(server.root).tensors
    assert remote.remote is not None
    assert remote.remote.requests == 1 + 1 + 2


@pytest.mark.parametrize("listed", [True, False])
def test_an_absent_shard_is_a_fact(server: Server, listed: bool) -> None:
    fill(server.root, 3)
    if listed:
        server.gone.add("model-1.safetensors")
    else:
        (server.root / "model-1.safetensors").unlink()
    checkpoint = open_checkpoint(REPO)
    assert checkpoint.absent_files == ("model-1.safetensors",)
    assert len(checkpoint.tensors) == 80


def test_a_damaged_shard_is_a_fact(server: Server) -> None:
    fill(server.root, 3)
    (server.root / "model-1.safetensors").write_bytes(b"\xff" * 5000)
    checkpoint = open_checkpoint(REPO)
    assert list(checkpoint.unreadable) == ["model-1.safetensors"]
    assert len(checkpoint.tensors) == 80


def test_a_server_that_ignores_ranges_is_cut_off(server: Server) -> None:
    fill(server.root, 1)
    server.ranges = False
    checkpoint = open_checkpoint(REPO)
    assert len(checkpoint.tensors) == 40
    assert checkpoint.remote is not None
    assert checkpoint.remote.bytes_read < 300_000


def test_token_is_sent_to_the_hub(server: Server) -> None:
    fill(server.root, 1)
    open_checkpoint(REPO, token="hf_test")
    assert {token for path, _, token in server.seen if "resolve" in path} == {"Bearer hf_test"}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ((401, "RepoNotFound"), "no hub repository"),
        ((404, "RepoNotFound"), "no hub repository"),
        ((404, ""), "no hub repository"),
        ((403, "GatedRepo"), "gated"),
        ((404, "RevisionNotFound"), "no revision v9"),
        ((500, ""), "status 500"),
    ],
)
def test_refusals_are_two_sentences(server: Server, status: tuple[int, str], words: str) -> None:
    server.status = status
    with pytest.raises(NextnError, match=words) as caught:
        open_checkpoint(REPO, revision="v9")
    assert caught.value.fix
    assert "/api/models/org/name/revision/v9" in server.seen[0][0]


def test_one_failure_is_tried_again(server: Server) -> None:
    fill(server.root, 1)
    server.failures_left = 2
    assert len(open_checkpoint(REPO).tensors) == 40


def test_slow_answers_end_in_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    server.delay_s = 0.3
    with pytest.raises(NextnError, match="in time"):
        open_checkpoint(REPO)


def test_bad_repository_ids_ask_nobody(server: Server) -> None:
    for source in ("org/na--me", "org/name.git"):
        with pytest.raises(NextnError, match="valid hub"):
            open_checkpoint(source)
    assert server.seen == []


def cache(server: Server, tmp_path: Path, names: list[str]) -> Path:
    """Put files of the repository in the hub's local cache, as huggingface_hub lays it out."""
    repository = tmp_path / "cache" / "models--org--name"
    snapshot = repository / "snapshots" / server.commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(server.commit)
    for name in names:
        (snapshot / name).symlink_to(server.root / name)
    return snapshot


def test_a_complete_snapshot_is_read_from_the_cache(server: Server, tmp_path: Path) -> None:
    fill(server.root, 2)
    names = [p.name for p in server.root.iterdir()]
    snapshot = cache(server, tmp_path, names)
    checkpoint = open_checkpoint(REPO)
    assert checkpoint.root == snapshot
    assert len(server.seen) == 1
    assert len(checkpoint.tensors) == 80
    (snapshot / "model-1.safetensors").unlink()
    assert open_checkpoint(REPO).root is None


def test_offline_uses_what_is_cached(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(server.root, 2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NextnError, match="HF_HUB_OFFLINE"):
        open_checkpoint(REPO)
    cache(server, tmp_path, ["config.json", "model-0.safetensors", "model.safetensors.index.json"])
    checkpoint = open_checkpoint(REPO)
    assert checkpoint.absent_files == ("model-1.safetensors",)
    assert len(checkpoint.tensors) == 40
    assert server.seen == []


def test_without_connection_the_cache_answers(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(server.root, 1)
    server.status = (502, "")
    with pytest.raises(NextnError, match="502"):
        open_checkpoint(REPO)
    cache(server, tmp_path, ["config.json", "model-0.safetensors"])
    assert len(open_checkpoint(REPO).tensors) == 40


def test_gguf_on_the_hub(server: Server) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf"):
        writer = gguf.GGUFWriter(server.root / name, "glm4moe")
        writer.add_block_count(3)
        writer.add_tensor("blk.2.nextn.eh_proj.weight", np.ones((4, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with pytest.raises(NextnError, match="2 GGUF models"):
        open_checkpoint(REPO)
    checkpoint = open_checkpoint(f"{REPO}/m-Q8_0.gguf")
    assert checkpoint.kind == "gguf"
    assert checkpoint.gguf["glm4moe.block_count"] == 3
    assert checkpoint.tensors["blk.2.nextn.eh_proj.weight"].shape == (4, 8)
    assert checkpoint.remote is not None
    assert checkpoint.remote.requests == 2
