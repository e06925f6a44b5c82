"""Compile the fused runner's kernels for a Hopper GPU without one: ``python -m tests.kernels.compile_for_hopper``.

Triton's interpreter does not check types as its compiler does, and never sees what is written for a GPU alone. Here
the wrappers run on CPU tensors, and each launch compiles its kernel and starts nothing.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface

from nextn.checkpoint.source import open_checkpoint
from nextn.engine.cache import Cache
from nextn.engine.contexts import Rows
from nextn.engine.fused import FusedRunner
from nextn.engine.sampling import SamplingParams, SamplingState
from nextn.kernels.row_plans import RowPlan, RowPlans
from nextn.kernels.rows_triton import gated_product, row_product
from nextn.models.load import load_decoder
from tests.oracle.checkpoints import make_checkpoint

SIZES = {"hidden_size": 128, "head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
PLANS = [
    RowPlan("fma", 4, 64), RowPlan("fma", 2, 128), RowPlan("dot", 32, 64, splits=2, stages=3),
    RowPlan("swap", 64, 32, splits=2, stages=3, first=1, ahead=1),
    RowPlan("swap", 64, 32, stages=3, first=2, ahead=2, block_m=32), RowPlan("dot", 32, 64, stages=3, first=1),
]  # fmt: skip


class Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_runner(dtype: torch.dtype, *, replay: bool) -> None:
    """Everything that a round and a prefill of a small hybrid model launch."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_checkpoint(Path(folder), "qwen3_5", **SIZES)
        model, _ = load_decoder(open_checkpoint(made), dtype=dtype, device=torch.device("cpu"))
    device = torch.device("cpu")
    cache = Cache(model.config, pages=8, page_size=16, sequences=3, rows=4, dtype=dtype, device=device, replay=replay)
    split = {"4": {"kind": "swap", "block_n": 64, "block_k": 64, "splits": 2}}
    plans = RowPlans({f"{w.shape[0]}x{w.shape[1]}": split for w in model.parameters() if w.dim() == 2})
    runner = FusedRunner(model, model, cache, longest=64, plans=plans, dependent=True)
    table, slots, committed = torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1]), torch.tensor([1, 1])
    for starts in (None, [0, 16]):
        positions = torch.tensor([[3], [20]]) + torch.arange(4)
        where = Rows(cache, table, positions, 32, slots, committed, starts=starts)
        where.settled = positions[:, 0].contiguous()
        post, pre = runner.target_rows(torch.zeros(2, 4, dtype=torch.int64), where)
        runner.head_rows(torch.zeros(2, 4, dtype=torch.int64), model.head_hidden(post, pre), where)
    logits = runner.logits(torch.zeros(2, 4, model.config.hidden, dtype=dtype))
    drafts = torch.zeros(2, 3, dtype=torch.int64)
    runner.best(logits[:, :1])
    tokens, accepted, broken = runner.accept_best(logits, drafts)
    runner.settle(committed, tokens, accepted, drafts, broken)
    params = [SamplingParams(temperature=0.7, top_p=0.9, top_k=9, min_p=0.1), SamplingParams(temperature=0.0)]
    state = SamplingState.build(params, [[0]] * 2, vocab_size=model.config.vocab)
    probs = runner.process(logits, state, drafts)
    draws = runner.uniforms(state.seed, torch.zeros(2, 4, dtype=torch.int64))
    runner.sample(probs, draws[..., 0])
    runner.accept(probs, drafts, probs[:, :3].contiguous(), draws)


@torch.inference_mode()
def main() -> None:
    compiled: set[str] = set()

    def compile_only(kernel: JITFunction[Any], *args: Any, **options: Any) -> None:
        kernel.run(*args, **options, warmup=True)
        compiled.add(kernel.fn.__name__)

    def launcher(kernel: KernelInterface[Any], grid: Any) -> Any:
        return partial(compile_only, kernel, grid=grid)

    driver.set_active(Hopper())
    KernelInterface.__getitem__ = launcher
    for dtype, replay in ((torch.bfloat16, True), (torch.float32, True), (torch.float32, False), (torch.float16, True)):
        compile_runner(dtype, replay=replay)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x, weight = torch.zeros(1, 128, dtype=dtype), torch.zeros(96, 128, dtype=dtype)
        for plan in PLANS:
            row_product(x, weight, plan, pdl=True)
            gated_product(x, weight, plan, pdl=True)
        for outputs in (96, 2):
            weight = torch.zeros(outputs, 128, dtype=dtype)
            for product in (row_product, gated_product):
                product(torch.zeros(4, 128, dtype=dtype), weight, RowPlan("fma", 2, 128), pdl=True)
    print(*sorted(compiled))


if __name__ == "__main__":
    main()
