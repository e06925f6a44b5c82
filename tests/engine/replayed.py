"""Graphs without a GPU: a stand-in whose replay runs the captured round again, into the tensors of its first run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nextn.engine.contexts import Rows
from nextn.engine.graphs import Captured, GraphExecutor
from nextn.engine.runner import PlainRunner

if TYPE_CHECKING:
    import pytest


class Far(PlainRunner):
    """Looks as far as the page table reaches: graphs know no bound, which only the plain modules need."""

    def target_rows(self, ids: Tensor, where: Rows) -> tuple[Tensor, Tensor]:
        where.bound = where.table.shape[1] * where.cache.page_size
        return super().target_rows(ids, where)

    def head_rows(self, ids: Tensor, hidden: Tensor, where: Rows, step: int = 0) -> tuple[Tensor, Tensor]:
        where.bound = where.table.shape[1] * where.cache.page_size
        return super().head_rows(ids, hidden, where, step)


class Replayed:
    """`torch.cuda.CUDAGraph`, as far as the executor uses it."""

    now: Replayed | None = None

    def __init__(self) -> None:
        self.work: Callable[[], None] | None = None

    def replay(self) -> None:
        assert self.work is not None
        self.work()


class Quiet:
    """A stream or an event of a device that is never behind."""

    def wait_stream(self, other: Quiet) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def capture(graph: Replayed, pool: object) -> Iterator[None]:
    Replayed.now = graph
    yield
    Replayed.now = None


def replay_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let `GraphExecutor` run on a CPU."""
    plain = Captured._round

    def round_(self: Captured) -> tuple[Tensor, Tensor]:
        outs = plain(self)
        if Replayed.now is not None:

            def again() -> None:
                for out, new in zip(outs, plain(self), strict=True):
                    out.copy_(new)

            Replayed.now.work = again
        return outs

    def copied(self: GraphExecutor, out: Tensor) -> Tensor:
        return out.clone()

    patch.setattr(Captured, "_round", round_)
    patch.setattr(GraphExecutor, "_copied", copied)
    stand_ins: dict[str, Any] = {
        "CUDAGraph": Replayed,
        "graph": capture,
        "Stream": Quiet,
        "Event": Quiet,
        "current_stream": Quiet,
        "stream": nullcontext,
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: None,
    }
    for name, value in stand_ins.items():
        patch.setattr(torch.cuda, name, value)
