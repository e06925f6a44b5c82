"""The automatic draft length against simulated clocks: it finds the best K, backs off, recovers, and stays cheap."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from nextn.engine.auto import AutoLength, Chances
from nextn.engine.draft_length import Observed

Times = Callable[[int, int], float]


def rate(size: int, k: int, chance: float, times: Times) -> float:
    """Tokens a second in the long run, each draft accepted with this chance if those before were."""
    return size * sum(chance**i for i in range(k + 1)) / times(size, k)


class World:
    """Batches whose drafts are accepted by chance and whose rounds take a given time, with noise.

    Args:
        late: results arrive after the next choice.
        warm_up: the first round of each K and size takes so many times longer.
    """

    def __init__(
        self, times: Times, *, most: int = 8, late: bool = False, warm_up: float = 40.0, seed: int = 0
    ) -> None:
        self.auto = AutoLength(most)
        self.times, self.warm_up, self.rng = times, warm_up, random.Random(seed)
        self.waiting: deque[Observed] = deque()
        self.delay = int(late)
        self.met: set[tuple[int, int]] = set()
        self.tokens, self.seconds = 0, 0.0

    def run(self, rounds: int, size: int, chance: float, *, timed: bool = True) -> Counter[int]:
        """How often each K was chosen."""
        chosen: Counter[int] = Counter()
        requests = list(range(size))
        for _ in range(rounds):
            k = self.auto.choose(requests)
            chosen[k] += 1
            accepted = []
            for _ in requests:
                a = 0
                while a < k and self.rng.random() < chance:
                    a += 1
                accepted.append(a)
            seconds = self.times(size, k) * self.rng.uniform(0.95, 1.05)
            self.tokens += sum(accepted) + size
            self.seconds += seconds
            if (size, k) not in self.met:
                self.met.add((size, k))
                seconds *= self.warm_up
            self.waiting.append(Observed(k, requests, accepted, size, seconds if timed else None))
            while len(self.waiting) > self.delay:
                self.auto.observe(self.waiting.popleft())
        return chosen


def cheap(size: int, k: int) -> float:
    """A GPU round: a draft costs 8 % of a step."""
    return 1.0 + 0.08 * k


def dear(size: int, k: int) -> float:
    """Drafts that cost as much as half a step each."""
    return 1.0 + 0.5 * k


def filling(size: int, k: int) -> float:
    """Rows become dear once the batch fills the machine."""
    return max(1.0, size * (k + 1) / 40) + 0.08 * k


CASES: list[tuple[Times, int, float]] = [
    (cheap, 1, 0.9),
    (cheap, 1, 0.7),
    (cheap, 8, 0.5),
    (cheap, 4, 0.05),
    (dear, 1, 0.9),
    (dear, 4, 0.7),
    (dear, 2, 0.3),
    (filling, 32, 0.8),
    (filling, 4, 0.8),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].__name__}-{c[1]}-{c[2]}")
def test_finds_what_pays(case: tuple[Times, int, float], late: bool) -> None:
    """From round 80 on the K chosen is nearly always within 4 % of the best; 600 rounds in all reach 94 % of it."""
    times, size, chance = case
    best = max(rate(size, k, chance, times) for k in range(9))
    good = {k for k in range(9) if rate(size, k, chance, times) > 0.96 * best}
    world = World(times, late=late)
    world.run(80, size, chance)
    later = world.run(520, size, chance)
    assert sum(later[k] for k in good) > 0.85 * 520, (later, good)
    assert world.tokens / world.seconds > 0.94 * best


def test_backs_off_and_asks_ever_more_rarely() -> None:
    world = World(dear)
    world.run(200, 2, 0.1)
    first, second = world.run(400, 2, 0.1), world.run(4000, 2, 0.1)
    assert first[0] >= 0.9 * 400
    assert second[0] >= 0.985 * 4000
    assert 4000 - second[0] > 0


def test_drops_when_acceptance_collapses_and_recovers_when_it_returns() -> None:
    world = World(cheap)
    assert world.run(300, 1, 0.9)[0] < 40
    world.run(150, 1, 0.01)
    assert world.run(300, 1, 0.01)[0] > 0.9 * 300
    world.run(400, 1, 0.9)
    back = world.run(200, 1, 0.9)
    assert sum(n for k, n in back.items() if k >= 4) > 0.8 * 200


def test_each_batch_size_has_its_own_length() -> None:
    world = World(filling)
    for _ in range(6):
        world.run(60, 1, 0.8)
        world.run(60, 64, 0.8)
    alone, crowd = world.run(100, 1, 0.8), world.run(100, 64, 0.8)
    assert alone.most_common(1)[0][0] >= 5
    assert crowd.most_common(1)[0][0] == 0


def test_requests_differ() -> None:
    """A batch of good requests drafts on while one of bad ones does not, in the same engine."""
    auto, rng = AutoLength(), random.Random(1)
    chosen: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for step in range(800):
        good = step % 2 == 0
        requests = [0, 1] if good else [2, 3]
        k = auto.choose(requests)
        accepted = [k if good and rng.random() < 0.97 else 0 for _ in requests]
        auto.observe(Observed(k, requests, accepted, 2, cheap(2, k)))
        if step > 400:
            chosen[good][k] += 1
    mean = {good: sum(k * n for k, n in c.items()) / c.total() for good, c in chosen.items()}
    assert mean[True] > 4 > 1 > mean[False]


def test_without_clocks_it_stays_where_it_began() -> None:
    assert World(cheap).run(100, 3, 0.9, timed=False) == {3: 100}
    assert World(cheap, most=2).run(10, 3, 0.9, timed=False) == {2: 10}


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_trials_lose_little(chance: float) -> None:
    """What exploring costs over the best K stays under the stated share, whatever acceptance is."""
    for times in (cheap, dear):
        world = World(times, warm_up=1.0)
        world.run(3000, 1, chance)
        best = max(rate(1, k, chance, times) for k in range(9))
        assert world.tokens / world.seconds > 0.96 * best


def test_forgets_requests_that_are_over() -> None:
    world = World(cheap)
    world.run(20, 4, 0.5)
    assert set(world.auto.own) == {0, 1, 2, 3}
    world.auto.forget(2)
    world.auto.forget(2)
    assert set(world.auto.own) == {0, 1, 3}


def test_chances_count_what_was_tried() -> None:
    """Position i counts only rounds that accepted all before it; counts fade but their ratio stays."""
    chances = Chances(3, 1e9)
    rounds: list[tuple[int, int]] = [(3, 3), (3, 0), (3, 1), (2, 2), (1, 1), (0, 0)]
    for k, accepted in rounds:
        chances.add(k, accepted)
    assert chances.tried == pytest.approx([5, 3, 1], abs=1e-6)
    assert chances.kept == pytest.approx([4, 2, 1], abs=1e-6)
    estimates: list[Any] = chances.estimates(0.5, 0.0)
    assert estimates == pytest.approx([4 / 5, 2 / 3, 1])
    chances.doubt()
    assert chances.estimates(0.5, 0.0) == pytest.approx([4 / 5, 2 / 3, 1])
    assert max(chances.tried) <= 4.0001
