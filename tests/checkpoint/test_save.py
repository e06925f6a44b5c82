"""Files that are written can be read by whom a new file can be read by."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nextn.checkpoint.save import save_tensors


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_permissions_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        save_tensors(tmp_path / "a.safetensors", {"x": torch.arange(3)})
        save_tensors(tmp_path / "a.safetensors", {"x": torch.arange(4)})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
    assert load_file(tmp_path / "a.safetensors")["x"].tolist() == [0, 1, 2, 3]
