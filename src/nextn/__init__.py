"""nextn: work with the multi-token-prediction heads that language models carry.

``from nextn import load, generate`` is the Python API; the command line is `nextn.cli`. Importing this package
imports no torch; the names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nextn.api import Model, generate, load, stream
    from nextn.generation import Generation, Step

__version__ = "0.1.0"
__all__ = ["Generation", "Model", "Step", "__version__", "generate", "load", "stream"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("nextn.api"), name)
    raise AttributeError(f"module 'nextn' has no attribute {name!r}")
