"""Imported first by what needs triton: ends the process with two sentences where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from triton.runtime.errors import OutOfResources
except ModuleNotFoundError:
    print(f"{Path(sys.argv[0]).name} needs triton, which is not installed here.", file=sys.stderr)
    print("A CUDA build of torch brings it; beside another: pip install -e '.[dev]'.", file=sys.stderr)
    raise SystemExit(2) from None

__all__ = ["OutOfResources"]
