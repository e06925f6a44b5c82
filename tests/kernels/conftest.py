"""Without a GPU the kernels run in Triton's interpreter; the variable must be set before Triton is imported.

The interpreter of Triton 3.6 to 3.9 multiplies the bit patterns of bf16 operands in `tl.dot`; here they are widened.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch

if not torch.cuda.is_available() and find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    plain_dot = InterpreterBuilder.create_dot

    def create_dot(self: InterpreterBuilder, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(t, tl.float32) if t.dtype == tl.bfloat16 else t for t in (a, b))
        return plain_dot(self, a, b, *rest)

    InterpreterBuilder.create_dot = create_dot
