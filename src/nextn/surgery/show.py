"""Print a plan: as lines for people, as one JSON object for programs. Both say the same."""

from __future__ import annotations

import json
from typing import Any

from nextn.surgery.plan import Edit, Plan, piece_bytes
from nextn.surgery.settings import ABSENT


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything that a plan says, with stable keys."""
    head = plan.head
    by_mode: dict[str, list[str]] = {"hard": [], "symlink": [], "copy": []}
    for link in plan.links:
        by_mode[link.mode].append(link.file)
    return {
        "action": plan.action,
        "out": str(plan.out),
        "family": plan.family,
        **plan.facts,
        "files": {
            "linked": [*by_mode["hard"], *by_mode["symlink"]],
            "copied": by_mode["copy"],
            "rewritten": {f: list(keys) for f, keys in plan.rewritten.items()},
            "left_out": dict(plan.dropped),
            "moved": dict(plan.moved),
            "head": head.file,
            "written": [*(s.file for s in plan.shards), *(t.file for t in plan.texts)],
        },
        "head_tensors": [
            {
                "key": p.key,
                "name": p.name,
                "dtype": p.dtype,
                "shape": list(p.shape),
                "bytes": piece_bytes(p),
                "from": list(p.sources),
                "cast_from": p.cast,
            }
            for p in head.pieces
        ],
        "left_out": dict(plan.left_out),
        "edits": [{"file": e.file, "path": e.path, "before": e.before, "after": e.after} for e in plan.edits],
        "notes": list(plan.notes),
    }


def as_lines(plan: Plan, only_plan: bool) -> list[str]:
    """The report on the screen."""
    facts = plan.facts
    verb = {"merge": ("would merge", "merged"), "extract": ("would extract", "extracted")}[plan.action][not only_plan]
    source = facts.get("head") or facts.get("from")
    lines = [f"{verb} {facts['tensors']} tensors ({_size(facts['bytes'])}) of {source} into {plan.out}"]
    linked = [link for link in plan.links if link.mode != "copy"]
    copied = [link for link in plan.links if link.mode == "copy"]
    if linked:
        lines.append(
            f"  linked     {len(linked)} files, {_size(sum(link.nbytes for link in linked))} ({linked[0].mode})"
        )
    if copied:
        lines.append(f"  copied     {len(copied)} files, {_size(sum(link.nbytes for link in copied))}")
    for file, keys in plan.rewritten.items():
        lines.append(f"  rewritten  {file} without {len(keys)} tensors of the old head")
    lines += [f"  left out   {file}: {why}" for file, why in plan.dropped.items()]
    lines += [f"  moved      {old} -> {new}" for old, new in plan.moved.items()]
    lines.append(f"  written    {', '.join([plan.head.file, *(t.file for t in plan.texts)])}")
    casts = {(p.cast, p.dtype) for p in plan.head.pieces if p.cast}
    for before, after in sorted((str(a), b) for a, b in casts):
        count = sum(1 for p in plan.head.pieces if (p.cast, p.dtype) == (before, after))
        lines.append(f"  cast       {count} tensors from {before} to {after}")
    if plan.renamed:
        old, new = next(iter(plan.renamed.items()))
        lines.append(f"  renamed    {len(plan.renamed)} tensors, e.g. {old} -> {new}")
    reasons: dict[str, list[str]] = {}
    for key, why in plan.left_out.items():
        reasons.setdefault(why, []).append(key)
    lines += [f"  left out   {len(keys)} tensors, e.g. {keys[0]}: {why}" for why, keys in reasons.items()]
    lines += [f"  edited     {e.file} {e.path}: {_change(e)}" for e in plan.edits]
    lines += [f"  note: {note}" for note in plan.notes]
    if only_plan:
        lines.append("nothing was written (--plan)")
    return lines


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _change(edit: Edit) -> str:
    before, after = edit.before, edit.after
    if isinstance(after, list):
        had = before if isinstance(before, list) else []
        longer = after[: len(had)] == had
        new = [str(v) for v in (after[len(had) :] if longer else [v for v in after if v not in had])]
        more = f", and {len(new) - 6} more" if len(new) > 6 else ""
        return f"added {', '.join(new[:6])}{more}"
    shown = [str(v) if v == ABSENT else json.dumps(v, ensure_ascii=False) for v in (before, after)]
    return " -> ".join(shown)


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
