"""nextn: work with the multi-token-prediction heads that language models carry.

``from nextn import load, generate`` is the Python API; the command line is `nextn.cli`. Importing this package
imports no torch; the names below are loaded on first use.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'nextn' has no attribute {name!r}")
