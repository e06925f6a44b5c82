"""Spread target and head over processes with FSDP2, from outside: no forward knows about it.

The target is sharded layer by layer, as it is loaded (`load_target`). Its embedding, final norm and output head form
the root's group: drafting uses them outside the root's forward, so that they are gathered explicitly (`gathered`). The
head is a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from nextn.models.decoder import Drafter
from nextn.train.processes import Processes
from nextn.train.unroll import HeadUnroll


def mesh_of(processes: Processes) -> DeviceMesh:
    """All processes in one dimension."""
    return init_device_mesh(processes.device.type, (processes.world,))


def shard(model: Drafter, unroll: HeadUnroll | None, processes: Processes) -> None:
    """Shard in place what is whole, where there is more than one process; layers are sharded as they are loaded.

    Args:
        unroll: of the model's head; None where it was loaded without one.
    """
    if processes.world == 1:
        return
    mesh = mesh_of(processes)
    head = set(unroll.parameters()) if unroll is not None else set()
    fully_shard(model, mesh=mesh, ignored_params=head)
    if unroll is not None:
        fully_shard(unroll, mesh=mesh)


@contextmanager
def gathered(*modules: Drafter | HeadUnroll) -> Iterator[None]:
    """Each module's own group of parameters whole on every process while the block runs."""
    sharded = [m for m in modules if isinstance(m, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
