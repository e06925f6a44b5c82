"""How many CPU threads a model is worth."""

from __future__ import annotations

import os

import torch

SMALL_WEIGHTS_BYTES = 64 << 20
"""Below this a step's products take microseconds each, and starting threads costs more than they give; on a busy
machine waiting for each other's time slices costs far more."""


def fit_threads(weight_bytes: int) -> None:
    """One thread for a small model on a CPU, unless OMP_NUM_THREADS says otherwise. For commands, not for the API."""
    if weight_bytes < SMALL_WEIGHTS_BYTES and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
