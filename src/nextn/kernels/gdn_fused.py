"""The chunked gated delta rule by flash-linear-attention's Triton kernels, where they are installed.

`gdn.gdn_chunk` defines it. These kernels (fla-core, ``fla/ops/gated_delta_rule``) keep the state in float32 and round
operands to the inputs' dtype, share key heads among value heads from version 0.6 on, and differentiate.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from nextn.kernels.norm import HALF, wide

LEAST = (0, 6)


@cache
def installed() -> bool:
    """Whether fla-core is there, in a version that takes fewer key heads than value heads."""
    try:
        found = re.match(r"(\d+)\.(\d+)", version("fla-core"))
    except PackageNotFoundError:
        return False
    return found is not None and tuple(map(int, found.groups())) >= LEAST


def available(x: Tensor) -> bool:
    """Whether rows like these can go through the kernels: half precision, on a GPU."""
    return x.is_cuda and x.dtype in HALF and installed()


class Bounds:
    """Where sequences laid end to end begin.

    Args:
        starts: of each sequence, and the end of the last; from 0.
        device: of the rows.

    Attributes:
        on_host, on_device: [sequences + 1] int64; kept together so that no kernel launch waits for the device.
    """

    def __init__(self, starts: list[int], device: torch.device) -> None:
        self.on_host = torch.tensor(starts)
        self.on_device = self.on_host.to(device)


def gdn_chunk_fused(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, bounds: Bounds
) -> tuple[Tensor, Tensor | None]:
    """Sequences of any lengths, laid end to end.

    Args:
        q, k: [1, rows, k_heads, k_dim]; v: [1, rows, v_heads, v_dim]; g, beta: [1, rows, v_heads], as in `gdn_chunk`.
        state: [sequences, v_heads, k_dim, v_dim] float32 before each sequence's first row; None for zeros.
        bounds: of the sequences.
    Returns:
        (out [1, rows, v_heads, v_dim] in v's dtype; the states after the last rows, float32, None where none came in).
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, final = chunk_gated_delta_rule(
        q,
        k,
        v,
        wide(g),
        beta.to(v.dtype),
        initial_state=state,
        output_final_state=state is not None,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds.on_device,
        cu_seqlens_cpu=bounds.on_host,
    )
    return out, final
