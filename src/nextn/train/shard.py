"""Spread target and head over processes with FSDP2, from outside: no forward knows about it.

The target is sharded layer by layer. Its embedding, final norm and output head form the root's group: drafting uses
them outside the root's forward, so that they are gathered explicitly (`gathered`). The head is a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from nextn.models.decoder import Decoder, Drafter
from nextn.train.processes import Processes
from nextn.train.unroll import HeadUnroll


def shard(model: Drafter, unroll: HeadUnroll, processes: Processes) -> None:
    """Shard in place where there is more than one process."""
    if processes.world == 1:
        return
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    head = set(unroll.parameters())
    if isinstance(model, Decoder):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=head)
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
