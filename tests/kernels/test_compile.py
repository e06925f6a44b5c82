"""The kernels compile for the GPU that they are written for, also where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = """_accept _accept_best _add_rms_norm _argmax _attend _block_sums _combine _cut _delta _few_rows _gather
_inputs _kept_sums _multiply_add _norm_gate _probs _qkv _residual_sums _rms_norm_pair _sample _search _settle
_sigmoid_mul _silu_mul _uniforms block_best"""


def test_every_kernel_of_a_round_and_a_prefill_compiles_for_hopper() -> None:
    """In a process of its own: here Triton is its interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_for_hopper"],
        cwd=Path(__file__).parents[2],
        env={**env, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == KERNELS.split()
