"""What a recipe would do, in words: `upshot train RECIPE --dry-run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from upshot.config.method import method_of
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Recipe
from upshot.config.registry import parameters_of
from upshot.models.local import describe_choice
from upshot.rewards.build import ARROW, EXTRACTED
from upshot.rewards.metric import metrics
from upshot.rollout.futures.classmates.map_file import classmate_names
from upshot.run.pace import count_talks, estimate_time, reply_limit, sampled_tokens
from upshot.tasks.base import Task, tasks
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.base import verifiers

if TYPE_CHECKING:
    from upshot.training.learner.memory.plan import MemoryPlan


def plan(recipe: Recipe, ranks: int = 1, tokens_per_s: float | None = None) -> str:
    """Describe a run on this many ranks; nothing is loaded or written. What is wrong with it: `checks`.

    tokens_per_s: how fast the policy samples, where somebody has stated it.
    """
    config = recipe.train
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    lines = [f"recipe     {recipe.name}, seed {recipe.seed}"]
    policy = recipe.model.path and (describe_choice(recipe.model.path) or recipe.model.path)
    adapters = ", LoRA" if recipe.model.lora else ""
    engine = ", sampled by vLLM" if recipe.model.engine.name == "vllm" else ""
    lines.append(f"policy     {policy or 'a new tiny model'}{adapters}{engine}")
    examples = count_examples(recipe, task)
    data = f"data       {config.data or recipe.task.name}: {examples} examples"
    lines += _rollouts(recipe, examples) if config.samples else [data]
    steps = config.resolve_steps(examples).steps
    passes = f" ({steps * config.prompts_per_step / examples:.3g} epochs)" if config.epochs and examples else ""
    schedule = f"learning rate {config.lr:g} ({config.schedule.name})"
    lines.append(f"training   {config.method}, {steps} steps{passes}, {schedule}")
    if config.samples:
        lines += estimate(recipe, task, steps)
    lines.append(estimate_time(recipe, steps, tokens_per_s))
    if ranks > 1:
        lines.append(_ranks(recipe, ranks))
    lines += [f"model      {role}: {spec.label if spec.url else spec.model}" for role, spec in recipe.models.items()]
    return "\n".join([*lines, memory(recipe, task, ranks)])


PROMPT_TOKENS = 600
"""About what the template of a user or judge has by itself."""
ANSWER_TOKENS = 200
"""About what a user or judge says."""
REMOTE = ("endpoint", "replicas", "provider")
"""Kinds of models that are asked over a network."""


@dataclass(frozen=True)
class HelperCost:
    """About what a run asks of a helper model."""

    role: str
    calls: int
    tokens_in: int
    tokens_out: int
    dollars: float | None
    """None: its prices are not known."""


def estimate(recipe: Recipe, task: Task, steps: int) -> list[str]:
    """About how many tokens a run samples, and what its helpers cost, replies taken as half as long as they may be."""
    sampled = sampled_tokens(recipe, steps)
    lines = [f"tokens     about {amount(sampled)} sampled in {steps} steps, at most {amount(2 * sampled)}"]
    for cost in helper_costs(recipe, task, steps):
        text = f"about {amount(cost.calls)} calls, {amount(cost.tokens_in)} tokens in, {amount(cost.tokens_out)} out"
        if cost.dollars is not None:
            text += f", ${cost.dollars:,.2f}"
        elif not recipe.models[cost.role].on_this_machine:
            text += f"; what they cost is known with models.{cost.role}.price_in and price_out ($ per million tokens)"
        lines.append(f"cost       {cost.role}: {text}")
    return lines


def helper_costs(recipe: Recipe, task: Task, steps: int) -> list[HelperCost]:
    """About what is asked of the user, the judge and the classmates, where those are behind an address."""
    futures, talks = recipe.futures, count_talks(recipe, steps)
    heard = PROMPT_TOKENS + (1 + futures.rounds) * (reply_limit(recipe) // 2)
    answers = dict.fromkeys(classmate_names(futures), talks * (1 if futures.rounds else futures.leaves))
    verified = verified_by_judge(task)
    judged = talks * (verified + count_judged({metric.name: metric.options for metric in recipe.reward.metrics}))
    calls = {**answers, "user": talks * futures.rounds, "judge": judged + verified * sum(answers.values())}
    remote = {role: spec for role, spec in recipe.needed_models.items() if spec.kind in REMOTE}
    return [price(role, spec, calls[role], heard) for role, spec in remote.items() if calls.get(role)]


def count_judged(named: Mapping[str, Any]) -> int:
    """How often metrics, by name with their settings, ask a judge about one conversation."""
    calls = 0
    for name, settings in named.items():
        _, arrow, inner = EXTRACTED.get(name, name).rpartition(ARROW)
        calls += "judge" in parameters_of(metrics.get(inner.strip()))[0]
        calls += bool(arrow) and (not isinstance(settings, Mapping) or settings.get("extract", "judge") == "judge")
    return calls


def verified_by_judge(task: Task) -> bool:
    """Whether the task's own verdict is a judge's; a mix of verifiers is not looked into."""
    name = task.verifier if isinstance(task, VerifiedTask) else ""
    return name in verifiers and "judge" in getattr(verifiers.get(name), "needs", ())


def price(role: str, spec: ModelSpec, calls: int, heard: int) -> HelperCost:
    """What calls with prompts of about `heard` tokens cost."""
    tokens_in, tokens_out, dollars = calls * heard, calls * ANSWER_TOKENS, None
    if spec.price_in is not None and spec.price_out is not None:
        dollars = (tokens_in * spec.price_in + tokens_out * spec.price_out) / 1e6
    return HelperCost(role, calls, tokens_in, tokens_out, dollars)


def amount(number: float) -> str:
    """A number for a reader: 1.2 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def memory(recipe: Recipe, task: Task, ranks: int = 1) -> str:
    """The memory plan of each rank as a table."""
    from upshot.training.learner.memory.fit import plan_recipe

    planned = plan_recipe(recipe, len(task.vocabulary() or ()), ranks)
    unknown = f"memory     planned once '{recipe.model.path}' is on this machine: its config.json is not"
    return unknown if planned is None else memory_table(planned)


def memory_table(plan: MemoryPlan) -> str:
    """Each part at both peaks, what was chosen, and the places of helpers that take turns."""
    from upshot.training.learner.memory.plan import GIB, MemoryPart

    setting, lines = plan.setting, list[str]()
    unit, word = (GIB, "GiB") if plan.peak >= GIB else (GIB >> 10, "MiB")
    if plan.limit:
        lines.append(f"{f'memory, {word}':<17} {'sampling':>9} {'learning':>9}")
        whole = MemoryPart("together", plan.sampling, plan.learning, f"of {plan.limit / GIB:.1f} that can be used")
        for part in (*plan.parts, whole):
            sizes = f"{part.sampling / unit:9.2f} {part.learning / unit:9.2f}"
            lines.append(f"  {part.name:<15} {sizes}  {part.why}".rstrip())
    again = {"none": "nothing", "mlp": "the first half of every MLP", "block": "each block"}[setting.checkpointing]
    layers = "" if setting.layers is None else f" of the first {setting.layers} layers"
    lines.append(f"micro-batch  {setting.tokens} tokens, {again}{layers} is recomputed in the backward pass")
    if plan.kv_bytes:
        rest = "gives its memory back while the learner works" if setting.park else "keeps its memory"
        adapters = {"copy": "", "in place": "; adapters are merged in place", "never": "; adapters are not merged"}
        lines.append(f"engine       {plan.kv_bytes / GIB:.1f} GiB for keys and values; {rest}{adapters[setting.merge]}")
    if layout := plan.layout:
        pairs = ", ".join(f"{a} and {b}" for a, b in layout.conflicts)
        leave = "; they leave while the learner works" if setting.helpers == "leave" else ""
        lines.append(f"helpers      {f'never together: {pairs}' if pairs else 'all together while they sample'}{leave}")
        for region in layout.regions:
            rivals = ", ".join(layout.rivals(region.name))
            place = f"{region.start / unit:.2f} to {region.stop / unit:.2f} of the arena"
            lines.append(f"  {region.name:<15} {place}{f', in turn with {rivals}' if rivals else ''}")
    if host := sum(part.host for part in plan.parts):
        lines.append(f"host         {host / GIB:.1f} GiB beside the program")
    return "\n".join(lines)


def count_examples(recipe: Recipe, task: Task) -> int:
    """How many rows, dialogues or pairs there are to learn from; a file that is not there is a `UserError`."""
    return len(method_of(recipe.train.method).examples(recipe.train, task))


def _ranks(recipe: Recipe, ranks: int) -> str:
    """Who does what of a step."""
    config = recipe.train
    most = -(-config.prompts_per_step // ranks)
    played = f"an engine each for up to {most} of a step's prompts, " if config.samples else ""
    idle = ranks - min(ranks, config.prompts_per_step)
    more = f"; {idle} of them play nothing: raise train.prompts_per_step" if played and idle else ""
    return f"ranks      {ranks} processes, {played}1/{ranks} of the optimizer's state and of the learning each{more}"


def _rollouts(recipe: Recipe, rows: int) -> list[str]:
    config, futures = recipe.train, recipe.futures
    replies = config.prompts_per_step * config.group_size
    played = futures.leaves if futures.rounds else 1
    weighted = ", ".join(f"{m.name} x {m.weight:g}" for m in recipe.reward.metrics)
    classmates = classmate_names(futures)
    answers = replies * futures.samples * len(classmates)
    turns = f"up to {replies * played * futures.rounds} user turns and as many policy turns a step"
    talk = f"{played} per reply, {futures.rounds} rounds: {turns}" if futures.rounds else "no turn follows a reply"
    asked = [f"classmates {', '.join(classmates)}: {futures.samples} answers each to a thought = {answers} a step"]
    return [
        f"task       {recipe.task.name}: {rows} training rows",
        f"a step     {config.prompts_per_step} prompts x {config.group_size} replies of up to "
        f"{recipe.episode.max_turns} turn(s) = {replies} replies",
        *(asked if classmates else [f"futures    {talk}"]),
        f"reward     {weighted}: {replies * played * len(recipe.reward.metrics)} scores a step",
    ]
