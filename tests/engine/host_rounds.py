"""Compare what executors bring to the host: everything equal, log probabilities to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nextn.engine.executor import HostRound


def assert_alike(got: Sequence[HostRound], expected: Sequence[HostRound]) -> None:
    assert [replace(r, logprobs=[]) for r in got] == [replace(r, logprobs=[]) for r in expected]
    mine, theirs = ([p for r in rounds for row in r.logprobs for p in row] for rounds in (got, expected))
    assert [len(row) for r in got for row in r.logprobs] == [len(row) for r in expected for row in r.logprobs]
    assert [p.token for p in mine] == [p.token for p in theirs]
    assert [[i for i, _ in p.top] for p in mine] == [[i for i, _ in p.top] for p in theirs]
    for a, b in ((a, b) for a, b in zip(mine, theirs, strict=True)):
        assert [a.logprob, *(v for _, v in a.top)] == pytest.approx([b.logprob, *(v for _, v in b.top)], abs=1e-4)
