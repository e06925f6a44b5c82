"""Load a head with SGLang's own model class, on a CPU, over parameters filled with NaN; say which are left.

Run as a script by the Python that has SGLang, so it imports nothing of nextn:

    python sglang_worker.py MODEL RESULT.json EXPECTED.json [ROWS.npz]

The class is built and fed by SGLang's own ModelConfig and loader, so that the index, name and quantisation handling
are the engine's. EXPECTED.json maps checkpoint keys to shapes; where a parameter is left, those keys are offered one
by one to find out which of them the engine would have put there.

With ROWS.npz the class's forward is run too, in float32: ``ids`` [rows], ``hidden`` [rows, hidden], ``positions``
[rows], and where the engine takes them from the target ``embed`` and ``head`` [vocab, hidden]. The logits [rows, vocab]
are written to RESULT.json.npz. Read in SGLang 0.5.23: ``model_loader/loader.py``, ``runtime_context.py``.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

from nan_fill import fill, heard, install_stubs, keys_of, survivors

MAY_BE_ABSENT = {
    "torchvision": "image transforms of multimodal processors",
    "tvm_ffi": "apache-tvm-ffi, the binding of compiled all-reduce kernels",
    "vllm": "compiled rotary kernel; SGLang's own plain rotary runs instead",
}
"""Packages that SGLang imports without asking; empty modules replace them where they are not installed."""


def start_engine(model: str) -> None:
    """One process, gloo, the CPU, SGLang's own published arguments."""
    from sglang.srt.runtime_context import SpawnRanks, get_context, publish

    arguments = get_context().override_server_args(model_path=model, device="cpu", tp_size=1).install()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    from sglang.srt.distributed import parallel_state

    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method="tcp://127.0.0.1:0"
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    initialize_dp_attention(arguments)


def build(model: str, dtype: str) -> tuple[Any, Any, Any]:
    """(the head as SGLang builds it, its loader, its model config). `dtype` as SGLang's ``--dtype``."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader as loaders

    config = ModelConfig(model_path=model, is_draft_model=True, dtype=dtype)
    load_config = LoadConfig()
    loader = loaders.get_model_loader(load_config, config)
    quant = loaders._get_quantization_config(config, load_config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        return loaders._initialize_model(config, load_config, quant).eval(), loader, config
    finally:
        torch.set_default_dtype(before)


def from_target(module: Any) -> list[str]:
    """Parameters that SGLang takes from the target model when both run (``set_embed_and_head``)."""
    if not hasattr(module, "get_embed_and_head"):
        return []
    shared = {id(p) for p in module.get_embed_and_head()}
    return [name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in shared]


def load(module: Any, loader: Any, config: Any) -> list[str]:
    """Feed the class from the checkpoint as SGLang does. Returns what it warned about."""
    with heard("sglang") as warnings:
        module.load_weights(loader._get_all_weights(config, module))
    return warnings.lines


def forward(module: Any, rows: dict[str, Any]) -> Any:
    """Logits [rows, vocab] of one sequence whose rows attend causally to each other."""
    import torch
    from sglang.srt.model_executor import forward_context
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    class Rows:
        """Stands for the compiled attention backends: softmax attention within one sequence, no cache."""

        def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool = True, **kwargs: Any) -> Any:
            q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).transpose(0, 1)
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=True
            )
            return out.transpose(0, 1).reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    ids = torch.from_numpy(rows["ids"])
    count = len(ids)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=count,
        input_ids=ids,
        req_pool_indices=torch.zeros(count, dtype=torch.int64),
        seq_lens=torch.full((count,), count),
        out_cache_loc=torch.arange(count),
        seq_lens_sum=count * count,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    dtype = next(module.parameters()).dtype
    batch.positions = torch.from_numpy(rows["positions"])
    batch.spec_info = types.SimpleNamespace(hidden_states=torch.from_numpy(rows["hidden"]).to(dtype))
    if "embed" in rows:  # set_embed_and_head also empties a GPU's cache
        with torch.no_grad():
            for place, name in zip(module.get_embed_and_head(), ("embed", "head"), strict=True):
                place.copy_(torch.from_numpy(rows[name]))
    with torch.no_grad(), forward_context.forward_context(forward_context.ForwardContext(attn_backend=Rows())):
        return module(ids, batch.positions, batch).next_token_logits.float().numpy()


def main(model: str, result: str, expected: str, rows: str | None) -> None:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # SGLang's Triton kernels, run by Triton's interpreter
    finder = install_stubs(MAY_BE_ABSENT)
    import sglang

    start_engine(model)
    module, loader, config = build(model, "auto" if rows is None else "float32")
    fill(module)
    out: dict[str, Any] = {
        "engine": "sglang",
        "version": getattr(sglang, "__version__", "unknown"),
        "class": type(module).__name__,
        "parameters": [n for n, _ in module.named_parameters()],
        "error": None,
        "warnings": [],
    }
    try:
        out["warnings"] = load(module, loader, config)
    except Exception as error:
        out["error"] = f"{type(error).__name__}: {error}"
    out["from_target"] = from_target(module)
    out["survivors"] = [s for s in survivors(module) if s["parameter"] not in out["from_target"]]
    if rows is not None and out["error"] is None:
        import numpy as np

        np.savez(f"{result}.npz", logits=forward(module, dict(np.load(rows))))
    with open(expected) as file:
        keys_of(module, out["survivors"], json.load(file))
    out["stubs"] = {name: MAY_BE_ABSENT[name] for name in sorted(finder.used)}
    with open(result, "w") as file:
        json.dump(out, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else None)
