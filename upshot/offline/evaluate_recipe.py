"""`upshot eval RECIPE --models a=…,b=…`: held-out rows of any task, played and scored as the recipe says.

The table has the reward and every metric of the recipe. All models get the same rows with the same seeds and, if the
simulated user opens, the same opening. One model is loaded at a time.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from upshot.config.load import load_recipe
from upshot.core.conversation import Row, derive_seed
from upshot.core.errors import UserError
from upshot.offline.arguments import read_model
from upshot.offline.evaluate import key_of, parse_models
from upshot.offline.job import Job
from upshot.offline.play.opened import OpenedRecipe, held_out, open_recipe, recipe_of_run
from upshot.offline.table import Line
from upshot.rewards.build import metric_labels
from upshot.rollout.check_names import check_names
from upshot.rollout.play import Opening, open_row, play_reply
from upshot.rollout.services import Spec, build_held_out
from upshot.tasks.base import groups_of, tasks

OF_THE_TASK = {
    "task": "task.name=…",
    "file": "task.file=…",
    "system": "episode.system=…",
    "user": "models.user=…",
    "judge": "models.judge=…",
    "metrics": "reward.metrics=…",
    "tokenizer": "",
    "max_messages": "episode.max_turns=… or futures.rounds=…",
    "max_tokens": "episode.max_tokens=…",
    "temperature": "eval.temperature=…",
}
"""Options of the paper's table → the recipe keys that replace them."""
REWARD = "reward"
UNTRAINED = "the recipe's own new model, before any training"


class RecipeEvaluation:
    """Plays and scores every held-out row with every model."""

    table_group: str | None = None

    def __init__(self, args: argparse.Namespace) -> None:
        """Check everything that can be checked before a model is loaded."""
        for option, instead in OF_THE_TASK.items():
            if getattr(args, option) != args.default_of(option):
                flag, how = f"--{option.replace('_', '-')}", f": {instead}" if instead else ""
                raise UserError(f"{flag} applies only with --task; a recipe sets it itself{how}")
        self.args = args
        self.recipe = load_recipe(args.recipe, args.overrides).recipe
        check_names(self.recipe)
        if not self.recipe.train.samples:
            raise UserError(
                f"train.method '{self.recipe.train.method}' plays no rows; give a recipe that plays the task "
                "(train.method=rl), and the trained run as one of --models"
            )
        self.name = self.recipe.name
        self.task = tasks.create(self.recipe.task.name, self.recipe.task.options, "task")
        if not args.models and not recipe_of_run(args.recipe):
            raise UserError("no models to compare; --models base=SPEC,trained=RUN names the rows of the table")
        run_models: dict[str, Spec | None] = {"start": self.recipe.model.path or None, "trained": args.recipe}
        named = parse_models(args.models) if args.models else run_models
        self.models = {name: spec and read_model(spec) for name, spec in named.items()}
        self.speakers = {name: str(spec or UNTRAINED) for name, spec in self.models.items()}
        whole_splits = ("train", "validation", "test") if args.split == "all" else ()
        rows = [row for split in whole_splits for row in self.task.rows(split)]
        self.rows = rows[: args.goals] if whole_splits else held_out(self.task, args.split, args.goals)
        weights = {metric.name: metric.weight for metric in self.recipe.reward.metrics}
        self.metrics: dict[str, Any] = {REWARD: 1.0, **weights}
        whole = self.recipe.model_dump(mode="json", exclude={"run_dir", "train", "trackers", "budget", "code"})
        self.settings = {"recipe": whole, "split": args.split, "seed": args.seed}
        self.lines: list[Line] = []
        self._openings: dict[str, Opening] = {}

    async def play(self, job: Job) -> dict[str, float]:
        """All rows with one model after the other."""
        done = {line["key"] for line in self.lines}
        pieces = [(row, number) for row in self.rows for number in range(self.recipe.eval.samples)]
        stats: dict[str, float] = {}
        for name, spec in self.models.items():
            todo = [(row, number) for row, number in pieces if key_of(row, name, number) not in done]
            if not todo:
                continue
            async with open_recipe(self.recipe, spec, job.budget) as opened:
                opened = replace(opened, context=build_held_out(self.recipe, opened.services, opened.context))

                async def one(piece: tuple[Row, int], name: str = name, opened: OpenedRecipe = opened) -> None:
                    line = await self._line(opened, name, *piece)
                    self.lines.append(line)
                    job.write(line, failure=line["missing"])

                await job.run(todo, one, len(pieces) - len(todo), shown=name)
                stats |= {f"{name}/{key}": value for key, value in opened.services.stats().items()}
        return stats

    async def _line(self, opened: OpenedRecipe, name: str, row: Row, number: int) -> dict[str, Any]:
        """One reply and its scores, as a line of `rollouts.jsonl`."""
        seed = derive_seed(self.args.seed, "eval")
        if row.id not in self._openings or self._openings[row.id].failure is not None:
            self._openings[row.id] = await open_row(opened.context, row, seed, 0)
        opening = self._openings[row.id]
        talk = opening.conversation(row, seed, 0, number, number)
        reply = await play_reply(opened.context, talk, 0, opening.failure)
        total = reply.reward.total
        unplayed = not reply.futures and not reply.reward.means  # the same command plays it again
        labels = metric_labels(self.metrics).values()
        means = {metric: reply.reward.means.get(metric, total) for metric in labels if metric != REWARD}
        return reply.to_dict(0) | {
            "key": key_of(row, name, number),
            "model": name,
            "speaker": self.speakers[name],
            "missing": str(total.reason) if total.is_missing and unplayed else None,
            "scores": {REWARD: total.to_dict()} | {metric: score.to_dict() for metric, score in means.items()},
            "groups": {"model": name, **groups_of(opened.task, row)},
        }
