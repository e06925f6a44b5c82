"""The load check: an engine's own model class loads the head over NaN, and whatever is still NaN is a failure.

Engines leave parameters that no tensor reached as they were allocated, mostly without a word; only such a check shows
it. The engine runs in a process of its own, by the Python that has it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nextn.errors import NextnError
from nextn.inspect.facts import Facts

Status = Literal["passed", "failed", "unavailable"]
WORKERS = {"sglang": "sglang_worker.py", "vllm": "vllm_worker.py"}
SECONDS = 1800
LAST_LINES = 12
"""How much of an engine's last words is passed on where it died."""


INSIDE_TARGET = (
    "transformers builds a head only inside its whole target, so that it is not loaded here; `nextn inspect` says which"
    " families it runs"
)


@dataclass(frozen=True)
class Survivor:
    """A parameter that was not loaded: the engine's name, the checkpoint keys meant for it, the share left."""

    parameter: str
    keys: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class LoadCheck:
    """What became of a load in an engine.

    Attributes:
        status: ``unavailable`` where the engine could not be asked; `detail` says why.
        model_class: the engine's class for this head.
        parameters: how many it has; from_target: those that it takes from the target when both run.
        warnings: what the engine said while loading.
        stubs: package -> why an empty module in its place does not matter.
    """

    engine: str
    status: Status
    detail: str
    version: str = ""
    model_class: str = ""
    parameters: int = 0
    from_target: tuple[str, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    warnings: tuple[str, ...] = ()
    stubs: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "status": self.status,
            "detail": self.detail,
            "version": self.version,
            "class": self.model_class,
            "parameters": self.parameters,
            "from_target": list(self.from_target),
            "survivors": [{"parameter": s.parameter, "keys": list(s.keys), "share": s.share} for s in self.survivors],
            "warnings": list(self.warnings),
            "stubs": dict(self.stubs),
        }


def check_load(facts: Facts, engine: str, python: str | None = None, rows: Path | None = None) -> LoadCheck:
    """Load a head in an engine.

    Args:
        python: the interpreter that has the engine; this one if None.
        rows: input for a forward as the worker documents; logits are written beside it as ``<rows>.logits.npz``.
    Raises:
        NextnError: the checkpoint is not on this machine.
    """
    root = facts.checkpoint.root
    if root is None:
        raise NextnError(f"{facts.checkpoint.source} is not on this machine.", "Download it, then verify the folder.")
    if engine == "nextn":
        return _check_nextn(facts)
    if engine not in WORKERS:
        return LoadCheck(engine, "unavailable", INSIDE_TARGET)
    interpreter = python or sys.executable
    missing = _lacks(interpreter, engine)
    if missing:
        return LoadCheck(engine, "unavailable", missing)
    worker = Path(__file__).parent / "workers" / WORKERS[engine]
    with tempfile.TemporaryDirectory() as folder:
        result, expected = Path(folder) / "result.json", Path(folder) / "expected.json"
        expected.write_text(json.dumps(_expected(facts)))
        command = [interpreter, "-W", "ignore", str(worker), str(root.resolve()), str(result), str(expected)]
        try:
            done = subprocess.run(
                [*command, *([str(rows)] if rows else [])],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return LoadCheck(engine, "unavailable", f"{engine} did not finish loading within {SECONDS} seconds.")
        if not result.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            said = lines[-1].strip()[:300] if lines else f"exit status {done.returncode}"
            detail = f"{engine} could not build its class on this machine: {said}"
            return LoadCheck(
                engine, "unavailable", detail, warnings=tuple(line[:300] for line in lines[-LAST_LINES:-1])
            )
        logits = Path(f"{result}.npz")
        if rows is not None and logits.is_file():
            Path(f"{rows}.logits.npz").write_bytes(logits.read_bytes())
        return _read(engine, json.loads(result.read_text()))


def _lacks(interpreter: str, engine: str) -> str:
    """Why an interpreter cannot be asked; "" if it can."""
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({engine!r}) is None)"
    try:
        code = subprocess.run([interpreter, "-c", find], capture_output=True, check=False, timeout=120).returncode
    except (OSError, subprocess.TimeoutExpired):
        return f"{interpreter} cannot be run; name the Python that has {engine} with --engine-python."
    return f"{engine} is not installed; name the Python that has it with --engine-python." if code else ""


def _expected(facts: Facts) -> dict[str, list[int]]:
    """Checkpoint keys to offer, missing ones first."""
    shapes = {key: list(shape) for key, shape in facts.expected.values()}
    first = {key: shapes[key] for key in facts.missing}
    return {k: s for k, s in {**first, **shapes}.items() if all(n >= 0 for n in s)}


def _read(engine: str, raw: Mapping[str, Any]) -> LoadCheck:
    left = tuple(Survivor(s["parameter"], tuple(s["keys"]), float(s["share"])) for s in raw["survivors"])
    status: Status
    if raw["error"]:
        status, detail = "failed", f"{engine} raised {raw['error']}"
    elif left:
        status, detail = "failed", f"{engine} loaded without an error and left {len(left)} parameters as they were"
    else:
        status, detail = "passed", f"{engine} loaded every parameter of {raw['class']}"
    return LoadCheck(
        engine,
        status,
        detail,
        raw["version"],
        raw["class"],
        len(raw["parameters"]),
        tuple(raw["from_target"]),
        left,
        tuple(raw["warnings"]),
        raw["stubs"],
    )


def _check_nextn(facts: Facts) -> LoadCheck:
    """nextn's own loader, which refuses what it cannot place; NaN is looked for all the same."""
    import torch

    from nextn import __version__
    from nextn.models.load import load_drafter

    if facts.family is not None and not facts.family.target:
        detail = f"nextn does not decode {facts.family.title}, so it has no class to load this head in"
        return LoadCheck("nextn", "unavailable", detail, __version__)
    try:
        model, _ = load_drafter(facts.checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    except NextnError as error:
        return LoadCheck("nextn", "failed", f"nextn refused: {error.what}", __version__)
    named = dict(model.named_parameters())
    left = tuple(
        Survivor(name, (), float(torch.isnan(p).float().mean())) for name, p in named.items() if torch.isnan(p).any()
    )
    detail = f"nextn left {len(left)} parameters as they were" if left else "nextn loaded every parameter"
    return LoadCheck(
        "nextn", "failed" if left else "passed", detail, __version__, type(model).__name__, len(named), survivors=left
    )
