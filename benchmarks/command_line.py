"""What the command lines of benchmarks share: counts, a GPU or a refusal, and the command that a record keeps."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

RESULTS = "benchmarks/results"
PRINTED = "file for the record; without it the record is only printed"


def positive(text: str) -> int:
    """A whole number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return value


def need_gpu() -> None:
    """End the process with two sentences and code 2 where torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name} measures on an NVIDIA GPU, and torch sees none here.", file=sys.stderr)
        print("Run it where `nvidia-smi` lists one, with a CUDA build of torch.", file=sys.stderr)
        raise SystemExit(2)


def recorded(results: str = RESULTS) -> str:
    """This process's command for its record: of a path only the last name, and `--out` in the folder of results.

    Args:
        results: where the record belongs in the project.
    """
    shown = ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
    for word in sys.argv[1:]:
        name = Path(word.removeprefix("--out=")).name
        if shown[-1] == "--out":
            shown.append(f"{results}/{name}")
        elif word.startswith("--out="):
            shown += ["--out", f"{results}/{name}"]
        else:
            shown.append(name if os.sep in word else word)
    return shlex.join(shown)
