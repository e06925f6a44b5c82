"""Tell targets apart: a fine-tune keeps names, shapes and often the output head, so every tensor is sampled.

The same weights under another path, or with another head merged in, are the same target.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import BinaryIO

import torch

from nextn.checkpoint.listing import Checkpoint
from nextn.models.config import decoder_config
from nextn.models.layout import target_keys
from nextn.train.samples import samples

TENSOR_SAMPLES, TENSOR_BYTES = 4, 64
HEAD_ONLY = ("family", "head_layers", "head_sparse")
"""What a decoder's configuration says of the head, and the family, which is told by name."""


def target_identity(checkpoint: Checkpoint, dtype: torch.dtype) -> str:
    """Of a local target without its head, as it is loaded in `dtype`."""
    assert checkpoint.root is not None
    config = decoder_config(checkpoint.config)
    shown = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in HEAD_ONLY}
    digest = hashlib.sha256(f"{dtype} {config.family.name} {sorted(shown.items())}".encode())
    files: dict[str, BinaryIO] = {}
    try:
        for name, key in sorted(target_keys(config, checkpoint.config, checkpoint.tensors)):
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
