"""What all tests share: hypothesis without deadlines, repeatable in CI, and GPU tests skipped where there is none."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("nextn", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("nextn")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
