"""Random traces: arrivals, cancellations, pauses, changing draft lengths; each request gets what it gets alone."""

from __future__ import annotations

import pytest

from tests.engine.replayed import replay_on_cpu
from tests.engine.traces import Outcome, run_trace

TRACES = 200
GRAPH_TRACES = 60


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run_trace(seed) for seed in range(TRACES)]


def test_each_request_gets_its_own_tokens(outcomes: list[Outcome]) -> None:
    """The comparison is in `run_trace`; here only that the traces met what they are for."""
    assert sum(o.pauses for o in outcomes) >= TRACES // 4
    assert sum(o.cancelled for o in outcomes) >= TRACES // 10
    assert sum(o.accepted for o in outcomes) >= TRACES
    assert set.union(*(o.lengths for o in outcomes)) == {0, 1, 2, 3, 4}
    assert sum(len(o.lengths) > 1 for o in outcomes) >= TRACES // 2


def test_so_it_does_over_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of every kind come and go: graphs made for one are loaded with what is left of another."""
    replay_on_cpu(monkeypatch)
    outcomes = [run_trace(seed, graphs=True) for seed in range(GRAPH_TRACES)]
    assert sum(o.pauses for o in outcomes) >= GRAPH_TRACES // 4
    assert sum(o.accepted for o in outcomes) >= GRAPH_TRACES
