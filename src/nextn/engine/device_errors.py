"""Errors of the device as errors with a cause and a way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nextn.errors import NextnError

LESS = "Lower the number of prompts at once, max_tokens, chunk or draft_tokens, or free memory that others hold."


def out_of_memory(error: Exception) -> bool:
    """Whether a device, or the host for a CPU, had no memory left; PyTorch has no class of its own for the latter."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def device_errors(doing: str, fix: str = LESS) -> Iterator[None]:
    """Turn a device's running out of memory, or failing, into a `NextnError`.

    Args:
        doing: ends "... ran out while".
        fix: what to do where memory ran out.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        cause = str(error).strip().splitlines()[0]
        raise NextnError(
            f"The GPU failed while {doing}: {cause}.",
            "Start again; if it comes back, run with CUDA_LAUNCH_BLOCKING=1 to see where, and report it.",
        ) from None
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        whose = "GPU's memory" if isinstance(error, torch.OutOfMemoryError) else "memory"
        raise NextnError(f"The {whose} ran out while {doing}.", fix) from None
