"""How long an engine takes from weights on the GPU until it answers: a prompt and the first round, batch 1, K = 3.

    python benchmarks/start_up.py --geometry 4b

`start_ups` starts this script twice for a geometry, in new processes: first with empty caches on disk, then with what
that run left in them. Triton keeps its binaries in ``TRITON_CACHE_DIR`` and, for kernels that ask for it, the outcome
of tuning; those of flash-linear-attention ask for it unless ``FLA_CACHE_RESULTS`` is 0 (its ``fla/utils/env.py``), and
take no tuned settings from elsewhere where ``FLA_CACHE_MODE`` is ``disabled`` (``fla/ops/utils/cache.py``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.command_line import need_gpu, positive
from benchmarks.decode_setup import random_model
from benchmarks.geometries import GEOMETRIES
from nextn.engine.engine import Engine
from nextn.engine.params import SamplingParams
from nextn.engine.request import Request
from nextn.models.decoder import Decoder

DRAFT_TOKENS = 3
NEW_TOKENS = 256
"""That the cache has room for."""
STARTED = "seconds from weights on the GPU to the first round: "


def seconds_to_first_round(model: Decoder, context: int) -> float:
    """Build an engine, let it take in a prompt of `context` random tokens and run the first round."""
    prompt = torch.randint(0, model.config.vocab, (context,)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    for news in Engine(model, draft_tokens=DRAFT_TOKENS).rounds([Request(prompt, params)]):
        if any(update.round is not None for _, update in news):
            return time.perf_counter() - began
    raise AssertionError("no round was run")


def start_ups(name: str, context: int) -> dict[str, Any]:
    """Start-up with empty caches on disk and with those that it left."""
    command = [sys.executable, __file__, "--geometry", name, "--context", str(context)]
    found: dict[str, Any] = {"prompt_tokens": context}
    with tempfile.TemporaryDirectory() as folder:
        for state in ("cold", "warm"):
            done = subprocess.run(
                command, env={**os.environ, **caches(folder)}, check=True, stdout=subprocess.PIPE, text=True
            )
            found[f"start_up_{state}_s"] = round(float(done.stdout.rsplit(STARTED, 1)[1]), 2)
    return found


def caches(folder: str) -> dict[str, str]:
    """Environment in which everything that is kept on disk between processes is kept in one folder."""
    return {
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "CUDA_CACHE_PATH": f"{folder}/cuda",
        "FLA_CACHE_RESULTS": "1",
        "FLA_CACHE_MODE": "disabled",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", required=True, choices=list(GEOMETRIES))
    parser.add_argument("--context", type=positive, default=1024, help="tokens of the prompt")
    options = parser.parse_args()
    need_gpu()
    model = random_model(GEOMETRIES[options.geometry])
    torch.cuda.synchronize()
    print(STARTED, seconds_to_first_round(model, options.context))


if __name__ == "__main__":
    main()
