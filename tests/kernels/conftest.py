"""Without a GPU the kernels run in Triton's interpreter.

That of Triton 3.6 to 3.9 multiplies the bit patterns of bf16 operands in `tl.dot`, and rounds to bf16 by
cutting off; here it widens the operands and rounds to nearest, as a GPU does.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

if not torch.cuda.is_available() and find_spec("triton"):
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: InterpreterBuilder, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(t, tl.float32) if t.dtype == tl.bfloat16 else t for t in (a, b))
        return plain_dot(self, a, b, *rest)

    def cast_impl(self: InterpreterBuilder, source: Any, to: Any) -> Any:
        if source.get_element_ty() == tl.float32 and to.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.array(source.data)).bfloat16().view(torch.int16)
            return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)
        return plain_cast(self, source, to)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
