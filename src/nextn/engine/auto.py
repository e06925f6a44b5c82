"""Choose K for each round by what pays: acceptance and round times as measured while decoding.

The K to take is the one with the most expected tokens a second: (sum over requests of 1 + A_1 + .. + A_K) / T(B, K).
A_i, the chance that d1..di are all accepted, is the product of conditional chances, counted with exponentially fading
weight for each request and for all together; a request's own count begins with a few observations of the pooled
chance, and positions that were hardly tried lean on the position before. T is the median of the last round times of
that K in batches of about that size (powers of two); the first is thrown away, since it may hold compilation or
capture.

K values without a measured time get an optimistic guess and are tried where that guess would win. What is lost on
trials against the best known K is added up and kept under a share of the time, so exploring stays cheap whatever
happens. Where K = 0 pays best, nothing more is learned about acceptance; then drafting is tried again for a few rounds
after 32 rounds, and after twice as many each time that it still does not pay. At K = 0 the head's extend goes on (its
cost is part of the measured time), so the draft cache is complete whenever drafting resumes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from nextn.engine.draft_length import Observed

START = 3
"""K until times are known."""
SAMPLES = 9
"""Round times remembered for each K and batch size."""
TRIAL_ROUNDS = 3
"""Rounds of a trial: one thrown away, two measured."""
PROBE_ROUNDS = 6
PROBE_AFTER, PROBE_AFTER_MOST = 32, 1024
"""Rounds at K = 0 before drafting is tried again."""
STALE = 96
"""Rounds after which the time of a close second is measured again."""
CLOSE = 0.85
SHARE = 0.02
"""Of all time that trials may lose."""
FREE_ROUNDS = 8
"""What trials may lose in the beginning, in rounds' times."""
HYSTERESIS = 1.02
"""How much better another K must be to be changed to."""
FIRST_CHANCE = 0.7
"""Of a first draft token, before anything is known."""
POOL_MEMORY, OWN_MEMORY = 200.0, 40.0
"""Observations that counts fade over."""
OWN_PRIOR, POOL_PRIOR = 6.0, 2.0
"""Observations of the pooled chance that a request's own count begins with, and how much a position leans on the one
before in the pool."""
DOUBTED = 4.0
"""Observations left of old counts when drafting is tried again."""


@dataclass
class Chances:
    """Fading counts: of the rounds in which d1..d(i-1) were accepted, how many tried and accepted di."""

    most: int
    memory: float
    tried: list[float] = field(init=False)
    kept: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.tried, self.kept = [0.0] * self.most, [0.0] * self.most

    def add(self, draft_tokens: int, accepted: int) -> None:
        """Count a round of one request.

        Positions that a drafting round did not propose fade too, so that a few unlucky trials do not speak for ever.
        """
        if not draft_tokens:
            return
        fade = 1 - 1 / self.memory
        for i in range(self.most):
            if i <= accepted or i >= draft_tokens:
                tried = i < draft_tokens
                self.tried[i] = self.tried[i] * fade + tried
                self.kept[i] = self.kept[i] * fade + (tried and accepted > i)

    def doubt(self) -> None:
        """Keep what was counted as a hint only."""
        for i, tried in enumerate(self.tried):
            scale = min(1.0, DOUBTED / tried) if tried else 1.0
            self.tried[i], self.kept[i] = tried * scale, self.kept[i] * scale

    def estimates(self, first: float, weight: float) -> list[float]:
        """Chance at each position, leaning on that of the position before like on so many observations."""
        out: list[float] = []
        for k, t in zip(self.kept, self.tried, strict=True):
            out.append((k + weight * (out[-1] if out else first)) / (t + weight))
        return out


@dataclass
class Timed:
    """Round times of one K in batches of one size."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    seen: int = 0
    last: int = 0

    @property
    def typical(self) -> float:
        return median(self.seconds)


@dataclass
class Trial:
    """Rounds left to run with a K in batches of one size."""

    draft_tokens: int
    rounds: int
    bucket: int


class AutoLength:
    """K of each round from measured acceptance and times.

    Args:
        most: the largest K.
    """

    def __init__(self, most: int = 8) -> None:
        self.most = most
        self.pool = Chances(most, POOL_MEMORY)
        self.own: dict[int, Chances] = {}
        self.times: dict[int, dict[int, Timed]] = {}
        self.now: dict[int, int] = {}
        self.trial: Trial | None = None
        self.rounds = 0
        self.undrafted = 0
        self.probe_after = PROBE_AFTER
        self.lost_seconds = self.total_seconds = 0.0
        self.best_rate: dict[int, float] = {}

    def choose(self, requests: Sequence[int]) -> int:
        bucket = _bucket(len(requests))
        self.rounds += 1
        if self.trial is not None and self.trial.bucket == bucket and self.trial.rounds > 0:
            self.trial.rounds -= 1
            return self.trial.draft_tokens
        self.trial = None
        tokens = self._expected(requests)
        times = {k: t.typical for k, t in self.times.get(bucket, {}).items() if t.seconds}
        if not times:
            return self._unmeasured(tokens, bucket)
        rates = {k: tokens[k] / seconds for k, seconds in times.items()}
        best = max(rates, key=lambda k: rates[k])
        kept = self.now.get(bucket, best)
        if kept in rates and rates[best] <= rates[kept] * HYSTERESIS:
            best = kept
        self.now[bucket], self.best_rate[bucket] = best, rates[best]
        self.undrafted = self.undrafted + 1 if best == 0 else 0
        self.trial = self._trial(bucket, best, tokens, times, rates)
        if self.trial is None:
            return best
        self.trial.rounds -= 1
        return self.trial.draft_tokens

    def observe(self, seen: Observed) -> None:
        for request, accepted in zip(seen.requests, seen.accepted, strict=True):
            self.pool.add(seen.draft_tokens, accepted)
            if request not in self.own:
                self.own[request] = own = Chances(self.most, OWN_MEMORY)
                own.tried = [OWN_PRIOR] * self.most
                own.kept = [OWN_PRIOR * c for c in self.pool.estimates(FIRST_CHANCE, POOL_PRIOR)]
            self.own[request].add(seen.draft_tokens, accepted)
        if seen.seconds is None:
            return
        bucket = _bucket(seen.size)
        timed = self.times.setdefault(bucket, {}).setdefault(seen.draft_tokens, Timed())
        timed.seen, timed.last = timed.seen + 1, self.rounds
        self.total_seconds += seen.seconds
        if timed.seen > 1:
            timed.seconds.append(seen.seconds)
            if bucket in self.now and seen.draft_tokens != self.now[bucket]:
                gained = sum(seen.accepted) + len(seen.accepted)
                self.lost_seconds = max(0.0, self.lost_seconds + seen.seconds - gained / self.best_rate[bucket])

    def forget(self, request: int) -> None:
        self.own.pop(request, None)

    def _expected(self, requests: Sequence[int]) -> list[float]:
        """Tokens that a round of these requests gives at each K from 0 to `most`."""
        pooled = self.pool.estimates(FIRST_CHANCE, POOL_PRIOR)
        out = [float(len(requests))] * (self.most + 1)
        for request in requests:
            own = self.own.get(request)
            chance, total = 1.0, 0.0
            for i, c in enumerate(own.estimates(pooled[0], 1.0) if own is not None else pooled):
                chance *= c
                total += chance
                out[i + 1] += total
        return out

    def _unmeasured(self, tokens: Sequence[float], bucket: int) -> int:
        """K for a batch size without times: the best by those of the nearest size."""
        known = {b: {k: t.typical for k, t in by.items() if t.seconds} for b, by in self.times.items()}
        near = min((b for b, by in known.items() if by), key=lambda b: abs(b - bucket), default=None)
        if near is None:
            return min(START, self.most)
        return max(known[near], key=lambda k: tokens[k] / known[near][k])

    def _trial(
        self,
        bucket: int,
        best: int,
        tokens: Sequence[float],
        times: dict[int, float],
        rates: dict[int, float],
    ) -> Trial | None:
        """What to try instead of the best known K, if anything."""
        if self.lost_seconds > SHARE * self.total_seconds + FREE_ROUNDS * times[best]:
            return None
        guesses = {k: tokens[k] / self._optimistic(k, times, bucket) for k in range(self.most + 1) if k not in times}
        if guesses:
            k = max(guesses, key=lambda k: guesses[k])
            if guesses[k] > rates[best]:
                return Trial(k, TRIAL_ROUNDS, bucket)
        others = {k: rate for k, rate in rates.items() if k != best}
        if best == 0:
            drafting = {k: rate for k, rate in others.items() if k}
            if drafting and self.undrafted >= self.probe_after:
                self.undrafted = 0
                self.probe_after = min(2 * self.probe_after, PROBE_AFTER_MOST)
                for chances in (self.pool, *self.own.values()):
                    chances.doubt()
                return Trial(max(drafting, key=lambda k: drafting[k]), PROBE_ROUNDS, bucket)
            return None
        self.probe_after = PROBE_AFTER
        stale = [k for k in others if self.rounds - self.times[bucket][k].last > STALE]
        close = [k for k in stale if others[k] > CLOSE * rates[best]]
        return Trial(max(close, key=lambda k: others[k]), TRIAL_ROUNDS, bucket) if close else None

    def _optimistic(self, k: int, times: dict[int, float], bucket: int) -> float:
        """A time for K that the real one will hardly be under."""
        low, high = min(times), max(times)
        slope = (times[high] - times[low]) / (high - low) if high > low else None
        if k > high:
            guess = times[high] + 0.75 * (slope or 0.0) * (k - high)
        elif k < low:
            proportional = times[low] * (k + 1) / (low + 1)
            guess = proportional if slope is None else max(proportional, times[low] - 2 * slope * (low - k))
        else:
            under, over = max(j for j in times if j < k), min(j for j in times if j > k)
            guess = 0.9 * (times[under] + (times[over] - times[under]) * (k - under) / (over - under))
        for other, by in self.times.items():
            shared = [j for j in times if j in by and by[j].seconds]
            if abs(other - bucket) == 1 and shared and k in by and by[k].seconds:
                guess = max(guess, 0.85 * times[shared[0]] * by[k].typical / by[shared[0]].typical)
        return guess


def _bucket(size: int) -> int:
    """Batches of sizes up to 1, 2, 4, 8, ... share times."""
    return (size - 1).bit_length()
