"""How many replicas of each helper, and how many workers, are needed so that they no longer slow down a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from benchmarks.sim.servers import Limits
from benchmarks.sim.site import Site
from benchmarks.sim.step import play
from benchmarks.sim.work import POLICY, Work

SLACK = 0.1
"""A step that takes no longer than this share more than with more than enough of everybody is not held up."""
SAMPLE = 256
"""Replies that the search plays at least: a fleet grows with the work, so a part of a large step stands for it."""
MOST_WORKERS = 64


@dataclass(frozen=True)
class Fleet:
    """The replicas and workers beside the policy's servers."""

    replicas: Mapping[str, int]
    """Of each helper that is served; a hosted one has none of ours."""
    workers: int

    def times(self, factor: int) -> Fleet:
        """The same for this many times the work."""
        return Fleet({name: count * factor for name, count in self.replicas.items()}, self.workers * factor)

    def at(self, site: Site) -> Site:
        """The site with this fleet."""
        helpers = {
            name: site.helper(name).model_copy(update={"replicas": count}) for name, count in self.replicas.items()
        }
        workers = site.workers.model_copy(update={"count": self.workers})
        return site.model_copy(update={"helpers": {**site.helpers, **helpers}, "workers": workers})


def fleet_of(work: Work, site: Site) -> Fleet:
    """The fleet that a site describes."""
    served = [name for name in work.calls() if name != POLICY and not site.helper(name).hosted]
    return Fleet({name: site.helper(name).replicas for name in served}, site.workers.count)


def part_of(work: Work, gpus: int) -> tuple[Work, int, int]:
    """A part of a large step with its GPUs, and how often it fits into the whole."""
    times = 1
    while work.replies / (2 * times) >= SAMPLE and work.prompts % (2 * times) == gpus % (2 * times) == 0:
        times *= 2
    return replace(work, prompts=work.prompts // times), gpus // times, times


def needed(work: Work, site: Site, gpus: int, slack: float = SLACK) -> Fleet:
    """The smallest number of each that does not delay the step, while there are more than enough of the others."""

    def seconds(fleet: Fleet) -> float:
        return play(work, fleet.at(site), gpus).seconds

    plenty = {name: more_than_enough(work, site, name) for name in fleet_of(work, site).replicas}
    ample = Fleet(plenty, min(work.replies, MOST_WORKERS))
    goal = seconds(ample) * (1 + slack)
    found = {}
    for name, most in plenty.items():
        found[name] = smallest(lambda n, name=name: seconds(replace(ample, replicas={**plenty, name: n})) <= goal, most)
    return Fleet(found, smallest(lambda n: seconds(replace(ample, workers=n)) <= goal, ample.workers))


def more_than_enough(work: Work, site: Site, name: str) -> int:
    """Replicas of a helper that would take all its calls of a step at once, in small batches."""
    at_once = min(work.limits.get(name, Limits()).concurrency, max(1, site.helper(name).server.max_running // 4))
    return math.ceil(work.calls()[name] / at_once)


def smallest(holds: Callable[[int], bool], most: int) -> int:
    """The smallest number for which something holds that holds for `most` and all between."""
    low, high = 0, most
    while high - low > 1:
        middle = max(low + 1, math.isqrt(low * high))  # the answer may be 2 or 2,000: halve the ratio, not the gap
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
