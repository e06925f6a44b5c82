"""Hold a merge to the rules of `nextn inspect` before anything is written: the result is listed as it would be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nextn.checkpoint.header import read_header
from nextn.checkpoint.jsonfile import parse_object
from nextn.checkpoint.listing import Header, assemble
from nextn.checkpoint.source import INDEX_NAME, Checkpoint
from nextn.checkpoint.tensors import TensorInfo
from nextn.errors import NextnError
from nextn.inspect.engines.table import ENGINE
from nextn.inspect.examine import Report, examine
from nextn.inspect.findings import Finding
from nextn.inspect.rules.engine import RAISED_WHERE_AN_ENGINE_FAILS
from nextn.surgery.plan import Plan, Shard, piece_bytes

OF_ENGINES = RAISED_WHERE_AN_ENGINE_FAILS | {"heads-unused"}
"""Findings that are errors for some engine only: said, and refused where that engine is the one asked for."""
SERVING = ("sglang", "vllm")


class Planned(Checkpoint):
    """A checkpoint that is not written yet; its JSON files are the plan's, or those of the base that it takes over."""

    def json(self, name: str) -> dict[str, Any] | None:
        assert self.read_remote is not None
        raw = self.read_remote(name)
        return None if raw is None else parse_object(raw, name)


def listed(plan: Plan, base: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """What `open_checkpoint` would find in the result.

    Args:
        names: weight file of the base -> its name in the result, for those that are taken over or rewritten.
    """
    assert base.root is not None
    root = base.root
    headers: dict[str, Header] = {}
    held: dict[str, dict[str, TensorInfo]] = {}
    for key, info in base.tensors.items():
        if key not in base.duplicates:
            held.setdefault(info.file, {})[key] = info
    doubled = {file for files in base.duplicates.values() for file in files}
    for old, new in names.items():
        tensors = read_header(root / old, old)[0] if old in doubled else held.get(old, {})
        headers[new] = {k: replace(t, file=new) for k, t in tensors.items()}, base.metadata.get(old, {})
    headers |= {shard.file: (_tensors(shard), dict(shard.metadata)) for shard in plan.shards}
    texts = {t.file: t.content for t in plan.texts if isinstance(t.content, bytes)}

    def read(name: str) -> bytes | None:
        path: Path = root / name
        return texts[name] if name in texts else path.read_bytes() if path.is_file() else None

    found = assemble(
        str(plan.out),
        plan.out,
        parse_object(texts["config.json"], "config.json"),
        dict(sorted(headers.items())),
        files=tuple(sorted(headers)),
        index=parse_object(texts[INDEX_NAME], INDEX_NAME)["weight_map"],
        unreadable={},
    )
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return Planned(**{**fields, "read_remote": read})


def _tensors(shard: Shard) -> dict[str, TensorInfo]:
    out: dict[str, TensorInfo] = {}
    at = 0
    for piece in shard.pieces:
        nbytes = piece_bytes(piece)
        out[piece.key] = TensorInfo(piece.key, piece.dtype, piece.shape, shard.file, at, nbytes)
        at += nbytes
    return out


def judged(result: Checkpoint, base: Checkpoint, head: Shard, engine: str | None) -> tuple[str, ...]:
    """What engines make of the result, as notes.

    Args:
        head: the shard that the merge adds.
        engine: the one that is to load the result, if named.
    Raises:
        NextnError: the result has an error that the base has not, or one about the head; or `engine` fails on it.
    """
    report = examine(result)
    if engine is not None and report.engines[engine].verdict == "fails":
        verdict = report.engines[engine]
        finding = next((f for f in report.findings if f.code in verdict.fatal), None)
        raise NextnError(
            f"{ENGINE[engine].title} {verdict.version} would fail on the result:"
            f" {(verdict.error or verdict.reasons[0]).rstrip('.')}.",
            _sentence(finding) if finding else "Name another --engine.",
        )
    errors = [f for f in report.findings if f.severity == "error" and f.code not in OF_ENGINES]
    if errors:
        keys = {p.key for p in head.pieces}
        before = {f.code for f in examine(base).findings if f.severity == "error"}
        for finding in errors:
            if finding.code not in before or keys & set(finding.tensors):
                raise NextnError(
                    f"The result would not be sound ({finding.code}): {finding.message}", _sentence(finding)
                )
    return tuple(engine_notes(report, engine))


def _sentence(finding: Finding) -> str:
    return finding.advice.rstrip(".") + "."


def engine_notes(report: Report, engine: str | None = None) -> list[str]:
    """A sentence for each serving engine that fails on a checkpoint or runs it badly, and for `engine` in any case."""
    notes = []
    for name in dict.fromkeys((*SERVING, *([engine] if engine else []))):
        verdict = report.engines[name]
        if verdict.verdict in ("fails", "degraded") or (name == engine and verdict.verdict != "works"):
            why = "; ".join((*([verdict.error] if verdict.error else []), *verdict.notes)).rstrip(".")
            codes = f" ({', '.join(verdict.reasons)})" if verdict.reasons else ""
            title = f"{ENGINE[name].title} {verdict.version}".strip()
            notes.append(f"{title}: {verdict.verdict}{codes}" + (f": {why}." if why else "."))
    return notes
