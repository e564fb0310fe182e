"""How long a step of a recipe takes on 8 to 1,024 GPUs, and how many simulator and judge replicas it needs.

    python benchmarks/cluster_sim.py collabllm-verl-grpo
    python benchmarks/cluster_sim.py collabllm-verl-grpo --gpus 8 16 --same-batch train.group_size=16
    python benchmarks/cluster_sim.py collabllm-verl-grpo --site site.yaml --set helpers.user.latency_s=2.5

A discrete-event simulation (benchmarks/sim/): agent-loop workers, rollout servers, helper endpoints with their limits,
retries and failures, long replies, lost GPUs, weight sync. What the recipe does not say
(speeds, lengths) is the site: a YAML file, `--set key=value`, or assumptions (`benchmarks/sim/site.py`).
The recipe's number of prompts is for the smallest number of GPUs and grows with the GPUs, unless --same-batch is set.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sim.fleet import SLACK, Fleet, fleet_of, needed, part_of
from benchmarks.sim.site import Site
from benchmarks.sim.step import Step, play
from benchmarks.sim.work import work_of
from upshot.config.load import explain_error, load_recipe, read_yaml
from upshot.core.errors import UserError

MOST_STEPS, REPLIES = 20, 4096
"""Steps that are simulated per line by default: fewer for larger ones."""
TIMES = ("GPUs", "steps", "replies", "step s", "rollout s", "tail s", "learn s", "sync s", "lost s", "missing")
WHERE = ("GPUs", "workers", "replicas", "calls", "seconds of a reply", "busy")


@dataclass(frozen=True)
class Line:
    """A line of both tables."""

    gpus: int
    steps: list[Step]
    fleet: Fleet

    def times(self) -> list[str]:
        """How long."""
        steps, parts = self.steps, ("seconds", "rollout", "tail", "learn")
        lost = statistics.mean(step.lost for step in steps)
        found = [both([getattr(step, part) for step in steps]) for part in parts]
        return [f"{self.gpus:,}", str(len(steps)), f"{len(steps[0].replies):,}", *found, f"{steps[0].sync:.0f}",
                f"{lost:.1f}", missing(steps)]  # fmt: skip

    def where(self) -> list[str]:
        """Why."""
        steps, first = self.steps, self.steps[0]
        return [
            f"{self.gpus:,}",
            f"{self.fleet.workers:,}",
            listed({name: f"{count:,}" for name, count in self.fleet.replicas.items()}),
            listed({name: f"{count:,}" for name, count in first.calls.items()}),
            listed({name: both(of_replies(steps, name)) for name in parts_of(steps)}),
            listed({name: f"{share:.0%}" for name, share in first.busy.items()}),
        ]


def listed(things: dict[str, str]) -> str:
    """Names and what is said of them."""
    return ", ".join(f"{name} {thing}" for name, thing in things.items()) or "-"


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in (head, *lines))


def parts_of(steps: Sequence[Step]) -> list[str]:
    """Where replies spend their time."""
    return sorted({name for step in steps for reply in step.replies for name in reply.parts})


def of_replies(steps: Sequence[Step], part: str) -> list[float]:
    """Seconds of every reply in one part."""
    return [reply.parts.get(part, 0.0) for step in steps for reply in step.replies]


def missing(steps: Sequence[Step]) -> str:
    """Replies without a reward."""
    share = statistics.mean(reply.missing for step in steps for reply in step.replies)
    return f"{share:.1%}" if share else "0"


def both(values: Sequence[float]) -> str:
    """Median and 95th percentile."""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"{show(statistics.median(ordered))}/{show(high)}"


def show(seconds: float) -> str:
    """Seconds, with a digit after the point where that says something."""
    return f"{seconds:.1f}" if seconds < 20 else f"{seconds:.0f}"


def site_of(file: str | None, words: Sequence[str]) -> Site:
    """The site of a file with `key=value` laid over it."""
    data: dict[str, Any] = read_yaml(Path(file), "site") or {} if file else {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"--set '{word}' should read key=value, such as workers.count=32")
        *path, last = key.split(".")
        inner = data
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = yaml.safe_load(text)
    try:
        return Site.model_validate(data)
    except ValidationError as error:
        raise UserError(f"site: {explain_error(error, Site)}") from None


def main(words: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="of the recipe: train.group_size=16")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=0, help="simulated steps a line; 0: as many as take seconds")
    parser.add_argument("--same-batch", action="store_true", help="the recipe's prompts on any number of GPUs")
    parser.add_argument("--as-it-is", action="store_true", help="take the site's replicas and workers; size nothing")
    parser.add_argument("--slack", type=float, default=SLACK, help="share by which the fleet may lengthen a step")
    parser.add_argument("--site", help="YAML file of what the recipe does not say")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="the same, one by one")
    options = parser.parse_intermixed_args(words)
    try:
        work = work_of(load_recipe(options.recipe, options.overrides).recipe)
        site = site_of(options.site, options.set)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    lines = []
    known: dict[tuple[int, int], Fleet] = {}
    for gpus in options.gpus:
        own = work if options.same_batch else replace(work, prompts=max(1, work.prompts * gpus // options.gpus[0]))
        fleet = fleet_of(own, site)
        if not options.as_it_is:
            part, share, times = part_of(own, gpus)
            if (part.prompts, share) not in known:
                known[part.prompts, share] = needed(part, site, share, options.slack)
            fleet = known[part.prompts, share].times(times)
        steps = options.steps or max(1, min(MOST_STEPS, REPLIES // own.replies))
        lines.append(Line(gpus, [play(own, fleet.at(site), gpus, seed) for seed in range(steps)], fleet))
    print(f"{options.recipe}: p50/p95 over simulated steps ('seconds of a reply': over replies)\n")
    print(aligned(TIMES, [line.times() for line in lines]) + "\n")
    print(aligned(WHERE, [line.where() for line in lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
