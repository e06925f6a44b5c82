"""Tell targets apart: a fine-tune keeps names, shapes and often the output head, so every tensor is sampled.

The same weights under another path, or with another head merged in, are the same target.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

import torch

from nextn.checkpoint.listing import Checkpoint
from nextn.models.config import decoder_config
from nextn.models.layout import target_keys
from nextn.train.samples import samples

TENSOR_SAMPLES, TENSOR_BYTES = 4, 64


def target_identity(checkpoint: Checkpoint, dtype: torch.dtype) -> str:
    """Of a local target without its head, as it is loaded in `dtype`."""
    assert checkpoint.root is not None
    digest = hashlib.sha256(str(dtype).encode())
    files: dict[str, BinaryIO] = {}
    try:
        for name, key in sorted(target_keys(decoder_config(checkpoint.config), checkpoint.config, checkpoint.tensors)):
            tensor = checkpoint.tensors.get(key)
            if tensor is None:
                continue
            if tensor.file not in files:
                files[tensor.file] = (checkpoint.root / tensor.file).open("rb")
            digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
            for sample in samples(files[tensor.file], tensor.start, tensor.nbytes, TENSOR_SAMPLES, TENSOR_BYTES):
                digest.update(sample)
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()[:32]
