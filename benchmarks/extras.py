"""Imported first by what needs the packages of ``.[dev]``: ends the process with two sentences where one is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

EXTRAS = ("pytest", "triton")

for name in EXTRAS:
    if find_spec(name) is None:
        print(f"{Path(sys.argv[0]).name} needs {name}, which is not installed here.", file=sys.stderr)
        print("Install what benchmarks need: pip install -e '.[dev]'.", file=sys.stderr)
        raise SystemExit(2)

from triton.runtime.errors import OutOfResources  # noqa: E402

__all__ = ["OutOfResources"]
