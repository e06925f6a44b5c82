"""Which process this is, on which device, and the few sums that processes share. One process needs no launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nextn.errors import NextnError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among those of a run.

    Attributes:
        rank: 0 to world - 1; 0 writes files and speaks.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes, on every one."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def each(self, value: T) -> list[T]:
        """Every process's value, in the order of their ranks, on every one; what `pickle` takes."""
        if self.world == 1:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def processes(device: str = "auto") -> Iterator[Processes]:
    """Join the others that torchrun started, if it did; leave them at the end.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``; under torchrun each process takes the GPU of its local rank.
    Raises:
        NextnError: there is no such device.
    """
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = _device(f"cuda:{local}" if kind == "cuda" and world > 1 else kind)
    if world == 1:
        yield Processes(0, 1, chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        dist.init_process_group("nccl", device_id=chosen)
    else:
        dist.init_process_group("gloo")
    try:
        yield Processes(dist.get_rank(), world, chosen)
    finally:
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise NextnError(f"There is no device {name[:40]} here.", "Use device=cpu, or a machine with a GPU.") from None
    return device
