"""What a recipe asks for in a step: how many replies and futures, and how many calls to each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.sim.servers import Limits
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import MetricConfig, Recipe
from upshot.core.errors import UserError
from upshot.rewards.build import ARROW
from upshot.rewards.metric import metrics
from upshot.rewards.metrics.judged import JudgeRating
from upshot.rollout.futures.classmates.map_file import read_map

POLICY = "policy"
"""The place of a helper that is the model in training."""
Chain = tuple[str, ...]
"""Calls one after the other, by the places they go to."""


@dataclass(frozen=True)
class Work:
    """One step of a recipe."""

    prompts: int
    group: int
    max_tokens: float
    turns: int = 1
    every_turn: bool = False
    """Whether futures are forked after each turn of the episode."""
    samples: int = 1
    rounds: int = 0
    user: str | None = None
    """Where the simulated user is; None: it costs nothing."""
    judges: tuple[Chain, ...] = ()
    """Of each future: chains that run side by side."""
    classmates: tuple[str, ...] = ()
    """Asked once a reply each, for `samples` answers; by name as often as a thought is cut."""
    save_every: int = 1
    limits: Mapping[str, Limits] = field(default_factory=dict)
    """By place."""

    @property
    def replies(self) -> int:
        """Replies that are trained."""
        return self.prompts * self.group

    @property
    def futures(self) -> int:
        """Futures in all, or as many finished conversations where nothing follows a reply."""
        return self.replies * (self.turns if self.every_turn else 1) * (self.samples if self.rounds else 1)

    def calls(self) -> dict[str, int]:
        """Calls of a step by place, where every episode and future lasts as long as it may; retries not counted."""
        out = {POLICY: self.replies * self.turns + self.futures * self.rounds}
        judged = [place for chain in self.judges for place in chain]
        for place, count in (
            *([(self.user, self.futures * self.rounds)] if self.user and self.rounds else []),
            *((place, self.futures) for place in judged),
            *((place, self.replies) for place in self.classmates),
        ):
            out[place] = out.get(place, 0) + count
        return out


def work_of(recipe: Recipe) -> Work:
    """The work of a recipe's step. Sandbox runs and metrics of one's own are not in it."""
    if recipe.train.method not in ("rl", "ppo", "online-dpo"):
        raise UserError(
            f"train.method is '{recipe.train.method}', which plays no rollouts: there is nothing to simulate"
        )
    models, futures = dict(recipe.models), recipe.futures
    classmates = futures.options.get("classmates", []) if futures.name == "classmates" else []
    if futures.name == "classmates" and futures.map_file is not None:
        served, configs = read_map(futures.map_file)
        models, classmates = {**served, **models}, list(configs)
    cuts = int(futures.options.get("cuts", 4)) if futures.options.get("reward") == "steps" else 1
    places = places_of(models)
    rounds = futures.rounds if futures.name != "none" else 0
    user = futures.user.options.get("model", "user") if futures.user and futures.user.name == "llm" else None
    return Work(
        prompts=recipe.train.prompts_per_step,
        group=recipe.train.group_size,
        max_tokens=recipe.episode.max_tokens,
        turns=recipe.episode.max_turns,
        every_turn=recipe.credit.by == "turns" and rounds > 0,
        samples=futures.samples,
        rounds=rounds,
        user=_place(user, places) if user and rounds else None,
        judges=tuple(chain for metric in recipe.reward.metrics if (chain := _judged(metric, places))),
        classmates=tuple(_place(c if isinstance(c, str) else c["name"], places) for c in classmates) * cuts,
        save_every=recipe.train.save.every or recipe.train.steps or 1,
        limits={place: limits_of(models[place]) for place in set(places.values()) - {POLICY}},
    )


def places_of(models: Mapping[str, ModelSpec]) -> dict[str, str]:
    """Where each helper's calls go: helpers of one spec share one endpoint and its limits."""
    out: dict[str, str] = {}
    for name, spec in models.items():
        same = next((other for other in out if models[other] == spec), name)
        out[name] = POLICY if spec.kind == "policy" else same
    return out


def limits_of(spec: ModelSpec) -> Limits:
    """How a recipe's helper is called."""
    return Limits(spec.concurrency, spec.requests_per_minute, spec.timeout_s, spec.retries, spec.backoff_s)


def _judged(metric: MetricConfig, places: Mapping[str, str]) -> Chain:
    """The calls of a metric: an extraction, a judge, both one after the other, or none."""
    judge = str(metric.options.get("judge", "judge"))
    _, arrow, inner = (part.strip() for part in metric.name.rpartition(ARROW))
    chain = [judge] if arrow and metric.options.get("extract", "judge") == "judge" else []
    made = metrics.get(inner, "reward.metrics")
    chain += [judge] if isinstance(made, type) and issubclass(made, JudgeRating) else []
    return tuple(_place(name, places) for name in chain)


def _place(name: str, places: Mapping[str, str]) -> str:
    if name not in places:
        raise UserError(f"the recipe asks '{name}', which is none of its models: {', '.join(places) or 'it has none'}")
    return places[name]
