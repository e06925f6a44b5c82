"""The convolution inside packed documents against PyTorch's own, document by document."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.cases import DEVICE, DTYPES, close, randn, real
from tests.train.packs import packed, random_documents

pytest.importorskip("triton")
from nextn.kernels import packed_conv_triton
from nextn.train.contexts import packed_conv
from nextn.train.layout import Layout

SIZES = [((5, 1, 40, 2, 3), 7, 300), ((17,), 0, 33), real((700, 1, 129, 7000), 41, 8192)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths,padding,channels", SIZES)
def test_each_document_alone(lengths: tuple[int, ...], padding: int, channels: int, dtype: torch.dtype) -> None:
    batch = packed(random_documents(lengths), padding)
    layout = Layout(batch.documents.to(DEVICE))
    wide = randn(1, sum(lengths) + padding, channels + 8, dtype=dtype)
    mixed, weight = wide[..., :channels], randn(channels, 4, seed=1, dtype=dtype) * 0.5
    found = packed_conv_triton.packed_conv(layout.documents, mixed, weight)
    assert bool(found.isfinite().all())
    for start, stop in layout.spans:
        rows = F.pad(mixed[0, start:stop].float().T, (3, 0))
        alone = F.silu(F.conv1d(rows[None], weight.float()[:, None], groups=channels))[0].T
        assert close(found[0, start:stop], alone)
    plain = packed_conv(layout, mixed.double(), weight.double())
    assert close(found, plain)
