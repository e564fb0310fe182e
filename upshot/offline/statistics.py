"""Means with intervals, and whether two rows of a table differ. Pure functions of lists of numbers.

Goals are the unit of resampling: every model plays the same goals, so differences are taken goal by goal. Missing
values must be removed from the lists beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import NormalDist
from typing import Any

LEVEL = 0.95
RESAMPLES = 4000
EXACT_UP_TO = 12
"""Up to this many pairs, all 2^n sign flips are counted; above that, random ones."""
BLOCK = 2_000_000
"""Most drawn numbers held in memory at once."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its interval."""

    mean: float
    low: float
    high: float
    n: int

    def times(self, factor: float) -> Estimate:
        """The same in another unit."""
        return Estimate(self.mean * factor, self.low * factor, self.high * factor, self.n)

    def to_dict(self, name: str = "value") -> dict[str, float]:
        """The interval for reports, with the mean under a name."""
        return {name: self.mean, "low": self.low, "high": self.high, "n": self.n}


@dataclass(frozen=True, slots=True)
class Difference:
    """How one row differs from another on the goals that both have a value for."""

    estimate: Estimate
    p_value: float
    """Two-sided; of the sign-flip test on paired differences, uncorrected for the number of comparisons."""

    def times(self, factor: float) -> Difference:
        """The same in another unit."""
        return Difference(self.estimate.times(factor), self.p_value)

    def to_dict(self) -> dict[str, float]:
        """The difference for reports."""
        return {**self.estimate.to_dict(), "p": self.p_value}


def estimate(values: Sequence[float], seed: int = 0) -> Estimate | None:
    """The mean with its interval; None without values.

    The interval is made of bootstrap percentiles. For scores that are all 0 or 1 it is Wilson's, which does not shrink
    to a point if all agree. Other values that are all equal have the interval [mean, mean]: there is no spread.
    """
    if not values:
        return None
    if all(value in (0.0, 1.0) for value in values):
        return wilson(int(sum(values)), len(values))
    return bootstrap(values, seed)


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean and the percentile interval of its bootstrap."""
    import numpy as np

    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if len(data) == 1 or float(data.min()) == float(data.max()):
        return Estimate(mean, mean, mean, len(data))
    low, high = _resampled(lambda at: data[at].mean(axis=1), len(data), seed)
    return Estimate(mean, low, high, len(data))


def _resampled(measure: Callable[[Any], Any], n: int, seed: int) -> tuple[float, float]:
    """The percentiles of a measure over many draws of `n` indices out of `n`; undefined values are left out."""
    import numpy as np

    generator, samples = np.random.default_rng(seed), []
    step = max(1, BLOCK // n)
    for start in range(0, RESAMPLES, step):
        samples.append(measure(generator.integers(0, n, size=(min(step, RESAMPLES - start), n))))
    low, high = np.nanquantile(np.concatenate(samples), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def macro(pairs: Sequence[tuple[bool, bool]], f1: bool, seed: int = 0) -> Estimate | None:
    """Mean over two classes of their accuracy, or of their F1, of (right, in the first class) pairs."""

    def both(right: Any, first: Any) -> Any:
        shares, wrong = [], (~right).sum(-1)
        for members in (first, ~first):
            good, missed = (right & members).sum(-1), (~right & members).sum(-1)
            shares.append(2 * good / (2 * good + wrong) if f1 else good / (good + missed))
        return (shares[0] + shares[1]) / 2

    return _of_pairs(pairs, both, seed)


def gmean2(pairs: Sequence[tuple[bool, bool]]) -> Estimate | None:
    """g-mean², TPR x TNR, of (predicted, true) pairs."""

    def both(hit: Any, yes: Any) -> Any:
        return (hit & yes).sum(-1) / yes.sum(-1) * ((~hit & ~yes).sum(-1) / (~yes).sum(-1))

    return _of_pairs(pairs, both, seed=0)


def _of_pairs(pairs: Sequence[tuple[bool, bool]], measure: Callable[[Any, Any], Any], seed: int) -> Estimate | None:
    """A measure of (said, class) pairs with the percentile interval of its bootstrap.

    None if all are of one class. Draws in which this happens are left out of the interval.
    """
    import numpy as np

    predicted, true = np.asarray(pairs, dtype=bool).T if pairs else (np.zeros(0, bool), np.zeros(0, bool))
    if true.all() or not true.any():
        return None
    with np.errstate(invalid="ignore"):
        low, high = _resampled(lambda at: measure(predicted[at], true[at]), len(true), seed)
        return Estimate(float(measure(predicted, true)), low, high, len(true))


def wilson(hits: int, n: int) -> Estimate:
    """A share and Wilson's score interval of it."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share = hits / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Estimate(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)), n)


def student(values: Sequence[float]) -> Estimate | None:
    """The mean and its Student interval, for a few runs; for a single value, the interval is the value itself."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean, mean, mean, 1)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = student_quantile((1 + LEVEL) / 2, len(values) - 1) * spread / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


@cache  # a table needs only one or two
def student_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t above one half, found by halving an interval on its distribution function."""
    import mpmath

    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        both_tails = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + middle**2), regularized=True)
        low, high = (middle, high) if 1 - both_tails / 2 < share else (low, middle)
    return (low + high) / 2


def compare(ours: Mapping[str, float], theirs: Mapping[str, float], seed: int = 0) -> Difference | None:
    """Our values minus theirs, over the goals that both have; None when they share none."""
    differences = [ours[goal] - theirs[goal] for goal in sorted(ours.keys() & theirs.keys())]
    return Difference(bootstrap(differences, seed), sign_flip_p(differences, seed)) if differences else None


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value that paired differences have mean zero: how often random signs give a mean as far from it.

    Exact for few pairs; otherwise from random flips, with one added to both counts so that it is never zero.
    """
    import numpy as np

    moved = np.asarray([d for d in differences if d != 0.0], dtype=np.float64)  # flipping a zero changes nothing
    if not len(moved):
        return 1.0
    observed = abs(float(moved.sum())) * (1 - 1e-12)  # rounding must not make the data less extreme than itself
    if len(moved) <= EXACT_UP_TO:
        signs = np.array(list(product((1.0, -1.0), repeat=len(moved))))
        return float((abs(signs @ moved) >= observed).mean())
    generator = np.random.default_rng(seed)
    flips, hits, step = 2 * RESAMPLES, 0, max(1, BLOCK // len(moved))
    for start in range(0, flips, step):
        signs = generator.integers(0, 2, size=(min(step, flips - start), len(moved))) * 2.0 - 1.0
        hits += int((abs(signs @ moved) >= observed).sum())
    return (hits + 1) / (flips + 1)
