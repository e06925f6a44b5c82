"""Write a safetensors file that others may read as they may any new file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``path`` with the permissions of a new file; `save_file` of safetensors 0.8 lets only its owner read it.

    Raises:
        OSError, safetensors.SafetensorError: the disk is full or fails; a part of the file may be there.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)
