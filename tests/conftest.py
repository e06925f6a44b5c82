"""What all tests share: hypothesis without deadlines, repeatable in CI; without a GPU Triton's interpreter, and GPU
tests skipped.

The interpreter's variable must be set before anything imports Triton, which many modules do.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
settings.register_profile("nextn", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("nextn")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
