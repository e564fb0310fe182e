"""Means with intervals, and whether two rows of a table differ. Pure functions of lists of numbers.

Goals are the unit of resampling: every model plays the same goals, so differences are taken goal by goal. Missing
values have left the lists before they come here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist
from typing import Any

LEVEL = 0.95
RESAMPLES = 4000
EXACT_UP_TO = 12
"""Up to so many pairs all 2^n sign flips are counted; above, random ones."""
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


@dataclass(frozen=True, slots=True)
class Difference:
    """How one row differs from another on the goals that both have a value for."""

    estimate: Estimate
    p_value: float
    """Two-sided; of the sign-flip test on paired differences, uncorrected for the number of comparisons."""

    def times(self, factor: float) -> Difference:
        """The same in another unit."""
        return Difference(self.estimate.times(factor), self.p_value)


def estimate(values: Sequence[float], seed: int = 0, level: float = LEVEL) -> Estimate | None:
    """The mean with its interval; None without values.

    Bootstrap percentiles; for scores that are all 0 or 1 Wilson's interval, which does not shrink to a point when all
    agree. Other all-equal values have the interval [mean, mean]: the data show no spread to resample.
    """
    if not values:
        return None
    if all(value in (0.0, 1.0) for value in values):
        return wilson(int(sum(values)), len(values), level)
    return bootstrap(values, seed, level)


def bootstrap(values: Sequence[float], seed: int = 0, level: float = LEVEL) -> Estimate:
    """The mean and the percentile interval of its bootstrap."""
    import numpy as np

    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if len(data) == 1 or float(data.min()) == float(data.max()):
        return Estimate(mean, mean, mean, len(data))
    generator = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    step = max(1, BLOCK // len(data))
    for start in range(0, RESAMPLES, step):
        stop = min(start + step, RESAMPLES)
        means[start:stop] = data[generator.integers(0, len(data), size=(stop - start, len(data)))].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(mean, float(low), float(high), len(data))


def wilson(hits: int, n: int, level: float = LEVEL) -> Estimate:
    """A share and Wilson's score interval of it."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = hits / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Estimate(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)), n)


def gmean2(pairs: Sequence[tuple[bool, bool]], seed: int = 0, level: float = LEVEL) -> Estimate | None:
    """g-mean², TPR x TNR, of (predicted, true) pairs with the percentile interval of its bootstrap.

    None where all are true or none is. Draws in which that happens are left out of the interval.
    """
    import numpy as np

    said, true = np.asarray(pairs, dtype=bool).T if pairs else (np.zeros(0, bool), np.zeros(0, bool))
    if true.all() or not true.any():
        return None

    def both(hit: Any, yes: Any) -> Any:
        with np.errstate(invalid="ignore"):
            return (hit & yes).sum(-1) / yes.sum(-1) * ((~hit & ~yes).sum(-1) / (~yes).sum(-1))

    generator, draws = np.random.default_rng(seed), []
    step = max(1, BLOCK // len(true))
    for start in range(0, RESAMPLES, step):
        at = generator.integers(0, len(true), size=(min(step, RESAMPLES - start), len(true)))
        draws.append(both(said[at], true[at]))
    tail = (1 - level) / 2
    low, high = np.nanquantile(np.concatenate(draws), [tail, 1 - tail])
    return Estimate(float(both(said, true)), float(low), float(high), len(true))


def compare(ours: Mapping[str, float], theirs: Mapping[str, float], seed: int = 0) -> Difference | None:
    """Our values minus theirs, over the goals that both have; None when they share none."""
    shared = sorted(ours.keys() & theirs.keys())
    differences = [ours[goal] - theirs[goal] for goal in shared]
    return Difference(bootstrap(differences, seed), sign_flip_p(differences, seed)) if differences else None


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value that paired differences have mean zero: how often random signs give a mean as far from it.

    Exact for few pairs; otherwise from random flips, with one added to both counts so that it is never zero.
    """
    import numpy as np

    moved = np.asarray([d for d in differences if d != 0.0], dtype=np.float64)  # a zero is a zero under either sign
    if not len(moved):
        return 1.0
    observed = abs(float(moved.sum())) * (1 - 1e-12)  # rounding must not make the data less extreme than itself
    if len(moved) <= EXACT_UP_TO:
        signs = np.array(list(product((1.0, -1.0), repeat=len(moved))))
        return float((abs(signs @ moved) >= observed).mean())
    generator = np.random.default_rng(seed)
    flips, hits, step = 2 * RESAMPLES, 0, max(1, BLOCK // len(moved))
    for start in range(0, flips, step):
        size = (min(step, flips - start), len(moved))
        signs = generator.integers(0, 2, size=size) * 2.0 - 1.0
        hits += int((abs(signs @ moved) >= observed).sum())
    return (hits + 1) / (flips + 1)
