"""Which settings of a run fit into a device, and which of them are the fastest. No torch, no weights.

Of what fits the cheapest in time is taken (`cost`). What is left of the memory is for keys and values, for the same
number of tokens in every engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from upshot.serving.swap.layout import MemoryLayout, lay_out, round_up
from upshot.training.learner.memory.plan import MemoryJob, MemoryPlan, MemorySetting, parts_of

BUSY, BUSY_SMALL, SMALL = 8192, 32768, 500_000_000
"""Tokens of a micro-batch that keep a GPU busy; of models with fewer parameters than the last."""
SIZES = (BUSY_SMALL, 24576, 16384, 12288, BUSY, 6144, 4096, 3072, 2048, 1024)
"""Tokens of a micro-batch to try; none is planned smaller than the last, unless the model's context is."""
ENOUGH_KV, MOST_KV = 0.2, 0.4
"""Shares of a GPU for keys and values: with less the engine waits, more is not taken."""


def list_settings(job: MemoryJob) -> Iterator[MemorySetting]:
    """What can be chosen."""
    model, overlaps = job.recipe.model, job.config.async_steps > 0
    kinds: tuple[str, ...] = (model.gradient_checkpointing,)
    if kinds == ("auto",):
        kinds = ("none", "mlp", "block") if job.thin else ("none", "block")
    merges = ["copy"]
    if model.lora and job.samples and not job.narrow:
        merges += ["in place", "never"] if job.lends else ["never"]
    # An engine that samples while the learner works is not parked, and is lent nothing.
    pauses = (False, True) if job.samples and not overlaps else (False,)
    turns = ("stay", "swap", "leave")[: (2 if overlaps else 3) if job.swappable else 1]
    for merge, kind, park, helpers, tokens in product(merges, kinds, pauses, turns, micro_batches(job)):
        if merge != "in place" or park:  # while the learner works its weights are its own
            yield MemorySetting(tokens, kind, merge, park, helpers)  # type: ignore[arg-type]


def micro_batches(job: MemoryJob) -> list[int]:
    """Tokens of a micro-batch to try, the largest first; never fewer than the longest sequence has."""
    if job.config.token_budget:
        return [max(job.config.token_budget, job.longest)]
    most = BUSY_SMALL if job.shape.parameters < SMALL else BUSY
    least = max(job.longest, min(SIZES[-1], job.shape.context or SIZES[-1]))
    return [*(tokens for tokens in SIZES if most >= tokens > least), least]


def make_plan(
    job: MemoryJob, setting: MemorySetting, tokens: int, limit: int, layout: MemoryLayout | None = None
) -> MemoryPlan:
    """The plan with keys and values of `tokens` tokens in every engine; `layout`: of helpers that take turns."""
    turns = job.swappable if setting.helpers != "stay" else ()
    kv = {helper.name: tokens * helper.kv for helper in job.helpers if helper not in turns}
    parts = parts_of(job, setting, tokens * job.kv, sum(kv.values()), layout.size if layout else 0)
    return MemoryPlan(setting, tokens * job.kv, kv, parts, limit, layout, job.helpers)


def fitting_plans(job: MemoryJob, setting: MemorySetting, limit: int) -> Iterator[MemoryPlan]:
    """Plans of a setting that fit into `limit` bytes."""
    tokens = job.wanted
    if setting.helpers != "stay":  # fewer keys and values leave more room for helpers beside each other
        while tokens >= job.least:
            empty = make_plan(job, setting, tokens, limit)
            room = limit - (empty.sampling if setting.helpers == "leave" else empty.peak)
            layout = lay_out({helper.name: helper.region(tokens) for helper in job.swappable}, room)
            if layout is not None and empty.learning <= limit:
                yield make_plan(job, setting, tokens, limit, layout)
            tokens = max(tokens // 2, job.least) if tokens > job.least else 0
        return
    empty, one = (make_plan(job, setting, count, limit) for count in (0, 1))
    each = one.sampling - empty.sampling
    tokens = min(tokens, max(int(MOST_KV * limit) // max(each, 1), job.least))
    for room, grows in ((limit - empty.sampling, each), (limit - empty.learning, one.learning - empty.learning)):
        tokens = min(tokens, room // grows) if grows else tokens if room >= 0 else -1
    if tokens >= job.least:
        yield make_plan(job, setting, tokens, limit)


def cost(job: MemoryJob, plan: MemoryPlan) -> float:
    """How long a step takes, in steps with everything in memory: half of it sampling, half learning, by rule of thumb.

    Computing blocks again is a third more learning, the way up of their MLPs half of that; a micro-batch reads all
    weights; a parked engine captures its steps again and fills its pages anew; called adapters sample at half the
    speed.
    """
    setting, layout = plan.setting, plan.layout
    learn = (1 + 1024 / setting.tokens) * {"none": 1, "mlp": 7 / 6, "block": 4 / 3}[setting.checkpointing]
    learn += 0.05 + 0.5 * layout.contended + 0.1 * (setting.helpers == "leave") if layout is not None else 0.0
    if not job.samples:
        return learn
    sample = {"copy": 1.0, "in place": 1.02, "never": 2.0}[setting.merge] + 0.1 * setting.park
    each = job.kv + sum(helper.kv for helper in job.helpers)
    enough = min(job.wanted * each, ENOUGH_KV * plan.limit)
    scarce = max(0.0, 1 - plan.kv_bytes / job.kv * each / enough) if enough else 0.0
    return learn + sample * (1 + scarce)


def choose(job: MemoryJob, limit: int) -> MemoryPlan | None:
    """The fastest settings that fit into `limit` bytes, with the rest for keys and values; None: nothing does."""
    fitting = (plan for setting in list_settings(job) for plan in fitting_plans(job, setting, limit))
    return min(fitting, key=lambda plan: cost(job, plan), default=None)


def find_nearest(job: MemoryJob, limit: int) -> MemoryPlan:
    """The settings that come nearest to fitting."""
    places = {helper.name: helper.region(job.least) for helper in job.swappable}
    layout = lay_out(places, round_up(max(places.values(), default=0)))
    plans = (
        make_plan(job, setting, job.least, limit, layout if setting.helpers != "stay" else None)
        for setting in list_settings(job)
    )
    return min(plans, key=lambda plan: plan.peak)
