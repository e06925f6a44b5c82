"""Errors of the device as errors with a cause and a way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nextn.errors import NextnError


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """Turn a device's running out of memory, or failing, into a `NextnError`; `doing` ends "... ran out while"."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise NextnError(
            f"The GPU's memory ran out while {doing}.",
            "Lower the number of prompts at once, max_tokens, chunk or draft_tokens, or free memory that others hold.",
        ) from None
    except torch.AcceleratorError as error:
        cause = str(error).strip().splitlines()[0]
        raise NextnError(
            f"The GPU failed while {doing}: {cause}.",
            "Start again; if it comes back, run with CUDA_LAUNCH_BLOCKING=1 to see where, and report it.",
        ) from None
