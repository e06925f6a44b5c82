"""Load a head with vLLM's own model class, on a CPU, over parameters filled with NaN; say which are left.

Run as a script by the Python that has vLLM, so it imports nothing of nextn:

    python vllm_worker.py MODEL RESULT.json EXPECTED.json

The class is chosen, built and fed by vLLM's ModelConfig and loader, as for ``"method": "mtp"``. vLLM's published
wheel has no compiled CPU kernels, so a forward is not run, and a quantised head may be refused by the CPU platform.
Read in vLLM 0.33.0: ``config/speculative.py``, ``model_executor/model_loader``, ``v1/spec_decode``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from nan_fill import fill, heard, install_stubs, keys_of, survivors

MAY_BE_ABSENT = {
    "torchvision": "image transforms of multimodal processors",
    "xgrammar": "grammar-constrained sampling",
}
FROM_TARGET = ("embed_tokens.weight", "lm_head.weight")
"""What the proposer shares with the target where the head's checkpoint has none of its own."""


def start_engine() -> None:
    """The CPU platform, which a wheel for GPUs does not choose by itself, and model inspection in this process."""
    import vllm.model_executor.models.registry as registry
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    if not platforms.current_platform.device_type:
        platforms._current_platform = CpuPlatform()
    registry._run_in_subprocess = lambda inspect: inspect()


def build(model: str) -> tuple[Any, Any, Any]:
    """(the head as vLLM builds it, its loader, its model config)."""
    import torch
    from vllm.config import (
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    config = ModelConfig(
        model=model,
        tokenizer=model,
        skip_tokenizer_init=True,
        trust_remote_code=True,
        hf_overrides=SpeculativeConfig.hf_config_override,
        max_model_len=64,
        enforce_eager=True,
    )
    whole = VllmConfig(model_config=config, device_config=DeviceConfig(device="cpu"), load_config=LoadConfig())
    with set_current_vllm_config(whole):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(config.dtype)
        return initialize_model(vllm_config=whole, model_config=config), get_model_loader(whole.load_config), config


def main(model: str, result: str, expected: str) -> None:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    finder = install_stubs(MAY_BE_ABSENT)
    import vllm

    start_engine()
    module, loader, config = build(model)
    fill(module)
    names = [n for n, _ in module.named_parameters()]
    out: dict[str, Any] = {
        "engine": "vllm",
        "version": getattr(vllm, "__version__", "unknown"),
        "class": type(module).__name__,
        "parameters": names,
        "from_target": [n for n in names if n.endswith(FROM_TARGET)],
        "error": None,
        "warnings": [],
    }
    with heard("vllm") as warnings:
        try:
            module.load_weights(loader.get_all_weights(config, module))
        except Exception as error:
            out["error"] = f"{type(error).__name__}: {error}"
    out["warnings"] = warnings.lines
    out["survivors"] = [s for s in survivors(module) if s["parameter"] not in out["from_target"]]
    with open(expected) as file:
        keys_of(module, out["survivors"], json.load(file))
    out["stubs"] = {name: MAY_BE_ABSENT[name] for name in sorted(finder.used)}
    with open(result, "w") as file:
        json.dump(out, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
