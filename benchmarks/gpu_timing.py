"""Time GPU work inside CUDA graphs, and say on what machine: shared by scripts that measure kernels and decoding."""

from __future__ import annotations

import datetime
import platform
import statistics
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.command_line import RESULTS, recorded


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """A graph of `work`, after two runs outside it; returns its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def median_ms(replay: Callable[[], object], repeats: int = 15, inner: int = 1) -> float:
    """Median over `repeats` of the time of `inner` calls, divided by `inner`, by device events."""
    times = []
    for _ in range(3):
        replay()
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return statistics.median(times)


def read_gb_per_s() -> float:
    """Read bandwidth: the sum of 4 GB of float32."""
    data = torch.ones(1_000_000_000, dtype=torch.float32, device="cuda")
    data.normal_()
    best = min(median_ms(captured(data.sum)) for _ in range(2))
    return data.numel() * 4 / best / 1e6


def bf16_tflops(size: int = 8192) -> float:
    """Arithmetic of a large square product of random bf16."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b) / 1e9


def provenance(results: str = RESULTS) -> dict[str, Any]:
    """Machine, versions, date and command of a result file, which belongs in the folder `results`."""
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    with suppress(PackageNotFoundError):
        versions["fla-core"] = version("fla-core")
    return {
        "machine": torch.cuda.get_device_name(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": recorded(results),
    }
