"""Are the head's values plausible? Reads the weights; the only findings that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nextn.inspect.case import Case
from nextn.inspect.facts import HeadTensor
from nextn.inspect.findings import Finding
from nextn.inspect.payload import DECODED, decode, read_bytes
from nextn.inspect.rules.head import CONVERT, train
from nextn.inspect.rules.words import listing, plural


@dataclass(frozen=True, slots=True)
class Values:
    """One tensor's values in numbers.

    Attributes:
        nans, infinities: how many.
        low, high: the extremes of the finite values.
        mean, deviation: over the finite values.
        excess: kurtosis minus 3; about 0 where values are drawn from a normal distribution, -1.2 from a uniform one.
        empty_parts: which of a stacked tensor's experts are all zero, in a ``gate_up`` gate and up apart (2e, 2e + 1).
    """

    tensor: HeadTensor
    nans: int
    infinities: int
    low: float
    high: float
    mean: float
    deviation: float
    excess: float
    empty_parts: tuple[int, ...] = ()

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
    parts = _parts(tensor)
    part_bytes = tensor.weight.nbytes // parts
    filled = set()
    for part, raw in _read_parts(case, tensor, parts, part_bytes):
        values = decode(raw, tensor.weight.dtype)
        if values.any():
            filled.add(part)
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
        return Values(tensor, nans, infinities, float("nan"), float("nan"), 0.0, 0.0, 0.0)
    m1, m2, m3, m4 = sums / count
    variance = max(m2 - m1 * m1, 0.0)
    fourth = m4 - 4 * m1 * m3 + 6 * m1 * m1 * m2 - 3 * m1**4
    excess = fourth / (variance * variance) - 3 if variance > 0 else 0.0
    empty = tuple(part for part in range(parts) if part not in filled) if parts > 1 and filled else ()
    return Values(tensor, nans, infinities, low, high, float(m1), float(variance**0.5), float(excess), empty)


def _parts(tensor: HeadTensor) -> int:
    """How many matrices a tensor stacks: its experts, gate and up apart; 1 where it is one matrix."""
    shape = tensor.weight.shape
    if tensor.spec.experts != "grouped" or len(shape) != 3 or not shape[0]:
        return 1
    halves = 2 if tensor.name.endswith("gate_up") and shape[1] % 2 == 0 else 1
    return shape[0] * halves


def _read_parts(case: Case, tensor: HeadTensor, parts: int, part_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(part, bytes) of a tensor, in pieces."""
    for part in range(parts):
        for raw in read_bytes(case.facts.checkpoint, tensor.weight, part * part_bytes, part_bytes):
            yield part, raw


def values_nonfinite(case: Case, values: tuple[Values, ...]) -> Iterator[Finding]:
    bad = [v for v in values if v.nans or v.infinities]
    if bad:
        first = bad[0]
        yield Finding(
            "values-nonfinite",
            "error",
            f"{plural(len(bad), 'head tensor holds', 'head tensors hold')} NaN or Inf: {first.tensor.weight.key} has "
            f"{first.nans:,} NaN and {first.infinities:,} Inf.",
            "Take an earlier checkpoint of the training run, or the base model's head",
            tuple(v.tensor.weight.key for v in bad),
            _replace(case),
        )


def _replace(case: Case) -> str:
    return CONVERT if case.is_gguf else case.take_from("BASE")


def values_zero(case: Case, values: tuple[Values, ...]) -> Iterator[Finding]:
    """Matrices of zeros, norms that multiply by zero, and experts of zeros in a stacked tensor."""
    family = case.facts.family
    nothing = -1.0 if family is not None and family.norm == "one_plus" else 0.0
    told: list[tuple[str, str]] = []
    for v in values:
        key = v.tensor.weight.key
        if v.nans or v.infinities:
            continue
        if v.matrix and v.low == 0 == v.high:
            told.append((key, key))
        elif not v.matrix and v.tensor.name.endswith("norm.weight") and v.low == nothing == v.high:
            told.append((key, f"{key} (a norm, {nothing:g} throughout: it multiplies by 0)"))
        elif v.empty_parts:
            experts = sorted({p // 2 if v.tensor.name.endswith("gate_up") else p for p in v.empty_parts})
            told.append((key, f"{key} (experts {', '.join(map(str, experts[:8]))})"))
    if told:
        yield Finding(
            "values-zero",
            "error",
            f"{plural(len(told), 'head tensor is', 'head tensors are')} zero, wholly or an expert: "
            f"{listing([words for _, words in told])}.",
            "The weights were never written; export the head again, or merge the base model's",
            tuple(key for key, _ in told),
            _replace(case),
        )


def values_constant(case: Case, values: tuple[Values, ...]) -> Iterator[Finding]:
    same = [v.tensor.weight.key for v in values if v.matrix and v.constant and v.low != 0]
    if same:
        yield Finding(
            "values-constant",
            "error",
            f"{plural(len(same), 'head matrix holds', 'head matrices hold')} one value throughout: {listing(same)}.",
            "The weights were never trained; merge a trained head",
            tuple(same),
            CONVERT if case.is_gguf else case.take_from("HEAD"),
        )


def values_untrained(case: Case, values: tuple[Values, ...]) -> Iterator[Finding]:
    """Norms all at their starting value, and matrices that look drawn from a normal or a uniform distribution."""
    family = case.facts.family
    start = 0.0 if family is not None and family.norm == "one_plus" else 1.0
    norms = [v for v in values if not v.matrix and "norm" in v.tensor.name]
    matrices = [v for v in values if v.matrix and not v.constant]
    drawn = [v for v in matrices if _drawn(v)]
    if norms and all(v.low == start == v.high for v in norms) and matrices and len(drawn) == len(matrices):
        trainable = family is not None and bool(family.target) and not case.is_gguf and not case.facts.alone
        yield Finding(
            "values-untrained",
            "warning",
            f"All {len(norms)} norms hold their starting value {start:g}, and the matrices look freshly drawn "
            f"(standard deviation {drawn[0].deviation:.3g}): the head was initialised and not trained.",
            "Train it" if trainable else "Put a trained head in its place",
            tuple(v.tensor.weight.key for v in (*norms, *drawn)),
            train(case, "native") if trainable else CONVERT if case.is_gguf else case.take_from("HEAD"),
        )


def _drawn(v: Values) -> bool:
    """Whether the moments are those of a fresh normal (PyTorch ``normal_``) or uniform (``nn.Linear``) start."""
    centred = abs(v.mean) < 0.05 * v.deviation
    return centred and (abs(v.excess) < 0.2 or abs(v.excess + 1.2) < 0.1)


def values_unchecked(case: Case, values: tuple[Values, ...]) -> Iterator[Finding]:
    """What was not looked at: tensors stored quantised."""
    looked = {v.tensor.name for v in values}
    left = [t for t in case.facts.head.values() if t.name not in looked]
    if left:
        dtypes = sorted({t.weight.dtype for t in left})
        yield Finding(
            "values-unchecked",
            "info",
            f"{len(left)} of {plural(len(case.facts.head), 'head tensor')} were not checked for plausible values: "
            f"they are stored as {', '.join(dtypes)}; {len(looked)} were.",
            "Check the head before it is quantised",
            tuple(t.weight.key for t in left),
            "nextn inspect BASE --values",
        )


RULES = (values_nonfinite, values_zero, values_constant, values_untrained, values_unchecked)
