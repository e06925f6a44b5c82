"""How the tests ask: build a folder, examine it, and look at the findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nextn.checkpoint.source import open_checkpoint
from nextn.inspect.examine import Report, examine
from tests.fixtures import Folder, checkpoint, qwen3_5
from tests.inspect.cases import ATTENTION, MLP

SMALL = {"hidden": 256, "inter": 512, "layers": 4, "heads": 2, "kv_heads": 1, "gdn_v_heads": 4}


LINEARS = ["mtp.fc", *ATTENTION, *MLP]


def ask(folder: Folder, root: Path, **versions: str) -> Report:
    return examine(open_checkpoint(folder.write(root)), versions)


def codes(report: Report) -> dict[str, str]:
    return {f.code: f.severity for f in report.findings}


def tensors(report: Report, code: str) -> tuple[str, ...]:
    return next(f for f in report.findings if f.code == code).tensors


def small(**quantisation: Any) -> Folder:
    folder = checkpoint(qwen3_5(**SMALL))
    if quantisation:
        folder.config["quantization_config"] = quantisation
    return folder
