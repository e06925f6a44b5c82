"""Size a cache by memory: what is free, and how many sequences and pages fit into a number of bytes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from nextn.engine.cache import Cache
from nextn.errors import NextnError
from nextn.models.config import DecoderConfig

STATE_SHARE = 0.5
"""Of the memory, at most, for recurrent states; the rest is for keys and values."""


CPU_SHARE = 0.7
"""Of what a machine without a GPU has free, what a cache may take; forwards need the rest."""
GPU_SHARE = 0.05
"""Of a GPU's memory, what is left to forwards and graphs, at least a gigabyte."""


def free_bytes(device: torch.device) -> int:
    """Memory that a cache on this device may take, with room left for the work beside it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, free + unused - max(10**9, int(GPU_SHARE * total)))
    return int(CPU_SHARE * min(_host_limits()))


def _host_limits() -> Iterator[int]:
    """Bytes that the machine, its control group and the process's own limit leave; what is not there says nothing."""
    page = os.sysconf("SC_PAGE_SIZE")
    yield os.sysconf("SC_PHYS_PAGES") * page
    facts = _numbers(Path("/proc/meminfo"))
    if "MemAvailable:" in facts:
        yield facts["MemAvailable:"] * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = (_number(group / f"memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        yield limit - used + _numbers(group / "memory.stat").get("inactive_file", 0)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield soft - (_number(Path("/proc/self/statm")) or 0) * page


def _numbers(path: Path) -> dict[str, int]:
    """The lines ``name number ...`` of a file of the kernel; nothing where there is none."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}


def _number(path: Path) -> int | None:
    """The number that a file of the kernel begins with."""
    try:
        word = path.read_text().split()[0]
    except (OSError, IndexError):
        return None
    return int(word) if word.isdecimal() else None


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What fits.

    Attributes:
        pages, sequences: for `Cache`.
        bytes: that such a cache takes.
    """

    pages: int
    sequences: int
    bytes: int


def cache_size(
    config: DecoderConfig,
    budget_bytes: int,
    *,
    page_size: int,
    rows: int,
    sequences: int,
    dtype: torch.dtype,
    replay: bool = False,
    least_pages: int = 1,
    least_sequences: int = 1,
) -> CacheSize:
    """The largest cache within a budget.

    Args:
        config: the decoder, `head_layers` 0 where the head is off.
        budget_bytes: memory for the cache.
        sequences: wanted at once; fewer where their states would take more than STATE_SHARE.
        page_size, rows, dtype, replay: as for `Cache`.
        least_pages, least_sequences: below which it is of no use.
    Raises:
        NextnError: not even the least fit.
    """

    def size(pages: int, held: int) -> int:
        return Cache(
            config,
            pages=pages,
            page_size=page_size,
            sequences=held,
            rows=rows,
            dtype=dtype,
            device=torch.device("meta"),
            replay=replay,
        ).nbytes

    page, state = size(1, 0), size(0, 1)
    least = least_pages * page
    if budget_bytes < least + least_sequences * state:
        raise NextnError(
            f"A cache of {budget_bytes / 1e6:.1f} MB holds no sequence: its states take {state / 1e6:.1f} MB, "
            f"{least_pages * page_size} positions {least / 1e6:.2f} MB.",
            "Give the cache more memory, or lower draft_tokens.",
        )
    held = sequences
    if state:
        most = min(int(budget_bytes * STATE_SHARE), budget_bytes - least) // state
        held = min(sequences, max(least_sequences, most))
    pages = (budget_bytes - held * state) // page
    return CacheSize(pages, held, size(pages, held))
