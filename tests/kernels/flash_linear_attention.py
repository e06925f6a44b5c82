"""A stand-in for flash-linear-attention's chunked kernel, which runs on GPUs only: its contract, computed plainly."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from nextn.kernels import gdn


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """As documented there for version 0.6.0: one row of sequences laid end to end, states [N, HV, K, V]."""
    assert scale is None
    assert use_qk_l2norm_in_kernel
    assert q.shape[0] == 1
    assert q.shape == k.shape
    assert v.shape[2] % q.shape[2] == 0
    assert g.shape == beta.shape == v.shape[:3]
    assert g.dtype == torch.float32 if v.dtype != torch.float64 else g.dtype == torch.float64
    assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
    assert cu_seqlens_cpu.device.type == "cpu"
    assert cu_seqlens.dtype == torch.int64
    assert int(cu_seqlens[-1]) == q.shape[1]
    if initial_state is not None:
        assert initial_state.shape == (len(cu_seqlens) - 1, v.shape[2], q.shape[3], v.shape[3])
        assert initial_state.is_contiguous()
    outs, states = [], []
    edges = cu_seqlens.tolist()
    for n, (start, stop) in enumerate(pairwise(edges)):
        state = initial_state[n : n + 1] if initial_state is not None else None
        out, last = gdn.gdn_chunk(*(x[:, start:stop] for x in (q, k, v, g, beta)), state)
        outs.append(out)
        states.append(last)
    return torch.cat(outs, 1), torch.cat(states) if output_final_state else None


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Let `from fla.ops.gated_delta_rule import chunk_gated_delta_rule` find the stand-in."""
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, module.__name__, module)
