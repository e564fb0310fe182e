"""Estimates what the stages of a table cost: calls, tokens, dollars, GPU hours. Nothing is loaded, called or written.

GPU hours are those of one H100 or H200 in bfloat16: two operations per weight and token while sampling (forward), six
while learning (forward and backward), at rates that such a device reaches with models of a few billion weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from upshot.config.load import load_recipe
from upshot.config.method import method_of
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.offline.arguments import read_metrics, read_model
from upshot.offline.sweep import plan_runs
from upshot.run.forecast import (
    PROMPT_TOKENS,
    REMOTE,
    HelperCost,
    amount,
    count_examples,
    count_judged,
    helper_costs,
    price,
)
from upshot.run.pace import sampled_tokens
from upshot.tasks.base import tasks
from upshot.training.learner.distributed.ranks import sum_by_name

SAMPLING_RATE = 8e13
"""Operations per second while sampling: 5,000 tokens of an 8B model."""
LEARNING_RATE = 4e14
EXAMPLE_TOKENS = 1500
"""Approximate tokens of a conversation to imitate, or of one side of a pair."""
WEIGHTS = re.compile(r"(\d+(?:\.\d+)?)\s*([bm])(?![a-z0-9])", re.IGNORECASE)


PARTS = ("calls", "tokens", "dollars", "sampled", "gpu_hours")
"""The parts of a cost: calls, tokens (in and out) and dollars of helpers, tokens of the policy, device hours."""
Cost = Mapping[str, float]


def describe_costs(
    stages: Mapping[str, tuple[Sequence[str], str]], model: str, examples: int, assume: Mapping[str, int]
) -> list[str]:
    """Two lines for each stage, and one for their sum.

    `stages`: the words of each one's command, and what it would run now. `model`: the model that is trained.
    `examples`, `assume`: the assumed number of training rows and evaluation goals that do not exist yet.
    """
    weights = weights_of(model)
    costs = {name: cost_of(words, weights, examples, assume.get(name, 0)) for name, (words, _) in stages.items()}
    lines = [f"{name:<14}{_line(costs[name])}\n{'':<14}upshot {now}" for name, (_, now) in stages.items()]
    return [*lines, f"{'all stages':<14}{_line(_sum(costs.values()))}"]


def cost_of(words: Sequence[str], weights: float, examples: int, goals: int) -> Cost:
    """What a command costs; preparing data counts as free."""
    if words[0] == "train":
        return train_cost(load_recipe(words[1], words[2:]).recipe, examples, weights)
    if words[0] == "sweep":
        runs = plan_runs(words[1], [word for word in words[2:] if "=" in word], 1)
        return _sum(train_cost(run.runs[0][0], examples, weights) for run in runs)
    return eval_cost(words, goals, weights) if words[0] == "eval" else _sum([])


def _line(cost: Cost) -> str:
    helpers = f"{amount(cost['calls'])} calls, {amount(cost['tokens'])} tokens, ${cost['dollars']:,.2f}"
    return f"about {helpers}; {amount(cost['sampled'])} tokens sampled, {cost['gpu_hours']:,.1f} GPU hours"


def _sum(costs: Iterable[Cost]) -> Cost:
    """All together."""
    return sum_by_name([dict.fromkeys(PARTS, 0.0), *costs])


def _cost(helpers: Iterable[HelperCost], sampled: float, gpu_hours: float) -> Cost:
    """How much the helpers are called, how much the policy samples, and how long the device works."""
    asked = [{"calls": h.calls, "tokens": h.tokens_in + h.tokens_out, "dollars": h.dollars or 0.0} for h in helpers]
    return _sum([*asked, {"sampled": sampled, "gpu_hours": gpu_hours}])


def weights_of(name: str) -> float:
    """The number of weights in a model's name (8B, 0.6B, 135M); 0 if the name does not say."""
    sizes = WEIGHTS.findall(name)
    return float(sizes[-1][0]) * {"b": 1e9, "m": 1e6}[sizes[-1][1].lower()] if sizes else 0.0


def train_cost(recipe: Recipe, examples: int, weights: float) -> Cost:
    """What a training costs; a file that does not exist yet is assumed to hold `examples` rows."""
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    try:
        there = count_examples(recipe, task)
    except (UserError, OSError):
        there = examples
    config = recipe.train
    steps = config.resolve_steps(max(there, 1)).steps
    if not config.samples:
        learned = steps * config.prompts_per_step * EXAMPLE_TOKENS * (1 + method_of(config.method).pairs)
        return _cost([], 0, 6 * weights * learned / LEARNING_RATE / 3600)
    sampled = sampled_tokens(recipe, steps)
    replies = steps * config.prompts_per_step * config.group_size
    learned = replies * (PROMPT_TOKENS + recipe.episode.max_turns * recipe.episode.max_tokens // 2)
    hours = (2 * weights * sampled / SAMPLING_RATE + 6 * weights * learned / LEARNING_RATE) / 3600
    return _cost(helper_costs(recipe, task, steps), sampled, hours)


def eval_cost(words: Sequence[str], goals: int, weights: float) -> Cost:
    """What the table of an evaluation costs: every model plays every goal to its end."""
    options = dict(pairwise(words))
    talks = int(options.get("--goals", goals)) * len(options.get("--models", "").split(","))
    turns = max(1, int(options.get("--max-messages", 2)) // 2)
    length = int(options.get("--max-tokens", 1024)) // 2
    judged = count_judged(read_metrics([options.get("--metrics", "")]))
    calls = {"--user": talks * turns, "--judge": talks * judged}
    sampled = talks * turns * length
    specs = {option: ModelSpec.parse(read_model(options[option])) for option in calls if option in options}
    heard = PROMPT_TOKENS + turns * length
    asked = [price(option, spec, calls[option], heard) for option, spec in specs.items() if spec.kind in REMOTE]
    return _cost(asked, sampled, 2 * weights * sampled / SAMPLING_RATE / 3600)
