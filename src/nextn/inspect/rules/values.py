"""Are the head's values plausible? Reads the weights; the only findings that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nextn.inspect.case import Case
from nextn.inspect.facts import HeadTensor
from nextn.inspect.findings import Finding
from nextn.inspect.payload import DECODED, decode, read_bytes
from nextn.inspect.rules.words import listing, plural


@dataclass(frozen=True, slots=True)
class Values:
    """One tensor's values in numbers.

    Attributes:
        nans, infinities: how many.
        low, high: the extremes of the finite values.
        mean, deviation: over the finite values.
        excess: kurtosis minus 3; about 0 where the values are drawn from a normal distribution.
    """

    tensor: HeadTensor
    nans: int
    infinities: int
    low: float
    high: float
    mean: float
    deviation: float
    excess: float

    @property
    def constant(self) -> bool:
        return self.low == self.high

    @property
    def matrix(self) -> bool:
        return len(self.tensor.spec.shape) > 1


def measure(case: Case, progress: Callable[[int, int], None] | None = None) -> tuple[Values, ...]:
    """Values of all head tensors in a floating-point format.

    Raises:
        NextnError: weights that are not on this machine.
    """
    tensors = [t for t in case.facts.head.values() if t.weight.dtype in DECODED]
    found = []
    for at, tensor in enumerate(tensors):
        found.append(_measure(case, tensor))
        if progress:
            progress(at + 1, len(tensors))
    return tuple(found)


def _measure(case: Case, tensor: HeadTensor) -> Values:
    import numpy as np

    nans = infinities = count = 0
    low, high = float("inf"), float("-inf")
    sums = np.zeros(4)
    for raw in read_bytes(case.facts.checkpoint, tensor.weight):
        values = decode(raw, tensor.weight.dtype)
        finite = np.isfinite(values)
        if not finite.all():
            nans += int(np.isnan(values).sum())
            infinities += int(np.isinf(values).sum())
            values = values[finite]
        if values.size:
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            count += values.size
            squares = np.square(values, dtype=np.float64)
            sums += (values.sum(dtype=np.float64), squares.sum(), (squares * values).sum(), np.square(squares).sum())
    if not count:
        return Values(tensor, nans, infinities, 0.0, 0.0, 0.0, 0.0, 0.0)
    m1, m2, m3, m4 = sums / count
    variance = max(m2 - m1 * m1, 0.0)
    fourth = m4 - 4 * m1 * m3 + 6 * m1 * m1 * m2 - 3 * m1**4
    excess = fourth / (variance * variance) - 3 if variance > 0 else 0.0
    return Values(tensor, nans, infinities, low, high, float(m1), float(variance**0.5), float(excess))


def values_nonfinite(case: Case, values: tuple[Values, ...]) -> Iterator[Finding]:
    bad = [v for v in values if v.nans or v.infinities]
    if bad:
        first = bad[0]
        yield Finding(
            "values-nonfinite",
            "error",
            f"{plural(len(bad), 'head tensor holds', 'head tensors hold')} NaN or Inf: {first.tensor.weight.key} has "
            f"{first.nans:,} NaN and {first.infinities:,} Inf.",
            "Take an earlier checkpoint of the training run, or the base model's head.",
            tuple(v.tensor.weight.key for v in bad),
        )


def values_zero(case: Case, values: tuple[Values, ...]) -> Iterator[Finding]:
    zero = [v.tensor.weight.key for v in values if v.matrix and v.low == 0 == v.high and not (v.nans or v.infinities)]
    if zero:
        yield Finding(
            "values-zero",
            "error",
            f"{plural(len(zero), 'head matrix is', 'head matrices are')} all zero: {listing(zero)}.",
            "The weights were never written; export the head again, or merge the base model's.",
            tuple(zero),
        )


def values_constant(case: Case, values: tuple[Values, ...]) -> Iterator[Finding]:
    same = [v.tensor.weight.key for v in values if v.matrix and v.constant and v.low != 0]
    if same:
        yield Finding(
            "values-constant",
            "error",
            f"{plural(len(same), 'head matrix holds', 'head matrices hold')} one value throughout: {listing(same)}.",
            "The weights were never trained; merge a trained head.",
            tuple(same),
        )


def values_untrained(case: Case, values: tuple[Values, ...]) -> Iterator[Finding]:
    """Norms all at their starting value, and matrices that look drawn from a normal distribution around zero."""
    family = case.facts.family
    start = 0.0 if family is not None and family.norm == "one_plus" else 1.0
    norms = [v for v in values if not v.matrix and "norm" in v.tensor.name]
    matrices = [v for v in values if v.matrix and not v.constant]
    drawn = [v for v in matrices if abs(v.excess) < 0.2 and abs(v.mean) < 0.05 * v.deviation]
    if norms and all(v.low == start == v.high for v in norms) and matrices and len(drawn) == len(matrices):
        yield Finding(
            "values-untrained",
            "warning",
            f"All {len(norms)} norms hold their starting value {start:g}, and the matrices look freshly drawn "
            f"(standard deviation {drawn[0].deviation:.3g}): the head was initialised and not trained.",
            f"Train it (nextn train {case.source}), or merge the base model's head.",
            tuple(v.tensor.weight.key for v in (*norms, *drawn)),
        )


RULES = (values_nonfinite, values_zero, values_constant, values_untrained)
