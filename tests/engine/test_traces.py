"""200 random traces: arrivals, cancellations, pauses, changing draft lengths; each request gets what it gets alone."""

from __future__ import annotations

import pytest

from tests.engine.traces import Outcome, run_trace

TRACES = 200


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
