"""`upshot demo`, `upshot demo tree`: one warm start, two ways to train from there, and a table that compares them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Row, derive_seed
from upshot.core.score import Score
from upshot.offline.demo.stages import Demonstration, train_stage
from upshot.offline.demo.workers import Progress, Steps, start_workers
from upshot.offline.play.opened import start_policy, with_policy
from upshot.offline.statistics import Estimate, estimate
from upshot.rewards.metric import score_by
from upshot.rollout.episode import NoRoom, Policy, catch_failure, play_future
from upshot.tasks.base import tasks

if TYPE_CHECKING:
    from upshot.rewards.metric import Metric
    from upshot.tasks.participants.base import Participant

ROWS = 600
"""Held-out conversations per model."""
STEPS = 50
"""Steps of each training: enough to learn to ask. With seed 0 the recipe's 80 steps give nearly the same table."""
ROUNDS = 4
"""User turns after which a held-out conversation is cut."""
SHARES = {"warm start": 0.3, "training": 0.7}
"""The share of the time that each stage takes, on two cores."""
STAGES = ("warm start", "single-reply reward", "multiturn-aware reward")
Stage = tuple[str, str, dict[str, Any]]
"""Its name, its description, and how its recipe differs."""
COLUMNS = ("model", "score, ambiguous", "score, unambiguous", "tokens", "asks, ambiguous", "asks, unambiguous")


@dataclass(frozen=True)
class OpeningOutcome:
    """How one held-out conversation went."""

    conversation: Conversation
    score: Score
    tokens: int = 0
    asked: bool = False
    """Whether the first reply was a question."""


def quickstart(overrides: Sequence[str], quiet: bool = False, as_json: bool = False) -> int:
    """Train the three models, evaluate them on held-out goals, print the table and the path of the report."""
    recipe = load_recipe("quickstart", [f"train.steps={STEPS}", *overrides]).recipe
    demo = Demonstration("demo", recipe, quiet, as_json)
    single = {"futures.rounds": 0, "credit.by": "reply"}
    stages: list[Stage] = [
        (STAGES[1], "reinforcement, each reply scored as it stands (0 rounds)", single),
        (STAGES[2], f"reinforcement, each reply scored by its futures ({recipe.futures.rounds} rounds)", {}),
    ]
    hint = "\nnext    upshot train quickstart futures.rounds=1    (then: upshot recipe list)"
    return compare_stages(recipe, demo, stages, "What the reward looks at decides what is learned", hint)


def tree(overrides: Sequence[str], quiet: bool = False, as_json: bool = False) -> int:
    """The same with openings only and twice the steps, to compare training with and without the later turns."""
    recipe = load_recipe("quickstart", ["task.midway=0", "train.steps=160", *overrides]).recipe
    demo = Demonstration("demo-tree", recipe, quiet, as_json)
    stages: list[Stage] = [
        ("credit to the reply", "reinforcement, as published: the reply alone is trained", {"credit.by": "reply"}),
        ("along the tree", "reinforcement, what the policy says in the futures is trained too", {"credit.by": "tree"}),
    ]
    hint = "\nnext    docs/results.md: a real model, five estimators    (upshot train withheld, on a GPU)"
    title = f"Credit to the reply compared with credit along the tree, {recipe.train.advantage.name}"
    return compare_stages(recipe, demo, stages, title, hint)


def compare_stages(recipe: Recipe, demo: Demonstration, stages: Sequence[Stage], title: str, hint: str) -> int:
    """Train a warm start and every stage from it; compare all on held-out goals. The last row is in bold."""
    warm: dict[str, Any] = {"warm_start": recipe.warm_start or {}, "train.steps": 0}
    with start_workers(Progress(demo.quiet)) as workers:
        demo.tell(f"\n1. {STAGES[0]}: demonstrations that mostly guess what was left unsaid")
        quiet = demo.quiet or not workers.here
        first = demo.recipe_of(recipe, STAGES[0], _folder(STAGES[0]), warm)
        train_first = [partial(train_stage, first, quiet)]
        [start] = workers.run("warm start", SHARES["warm start"], train_first, _steps_of([first]))
        runs = []
        for number, (name, what, changes) in enumerate(stages, 2):
            demo.tell(f"{number}. {name}: {what}")
            runs.append(demo.recipe_of(recipe, name, _folder(name), changes, start))
        demo.tell(f"each is then evaluated on {ROWS} held-out openings")
        # The longest training comes first; the first free core evaluates the warm start.
        jobs = [partial(_train_and_evaluate, recipe, run, quiet) for run in reversed(runs)]
        jobs.append(partial(_evaluate, recipe, start))
        outcomes = workers.run("training", SHARES["training"], jobs, _steps_of(runs))
    names = [STAGES[0], *(name for name, _, _ in stages)]
    table = make_table(dict(zip(names, reversed(outcomes), strict=True)), title)
    table["note"] += f" Seed {recipe.seed};"
    table |= tell_finding(table["rows"]) | show_asking(demo.root, names[1:])
    return demo.finish(recipe, table, names[-1], hint)


def _steps_of(runs: Sequence[Recipe]) -> Steps:
    """The run folders, and how many lines their metrics will have."""
    warm = [run.warm_start.steps if run.warm_start else 0 for run in runs]
    return [(Path(run.run_dir or ""), run.train.steps + steps) for run, steps in zip(runs, warm, strict=True)]


def _train_and_evaluate(recipe: Recipe, run: Recipe, quiet: bool) -> list[OpeningOutcome]:
    """Train one stage to its end, and play whole conversations with the result."""
    return _evaluate(recipe, train_stage(run, quiet))


def _folder(name: str) -> str:
    return name.replace(" ", "-")


def tell_finding(rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The last row of the table compared with the one before it, in words; '' if one of them was not measured."""
    (name, score, _, _, asks, *_), (other, other_score, _, _, other_asks, *_) = rows[-1], rows[-2]
    if any(isinstance(cell, str) for cell in (score, asks, other_score, other_asks)):
        return {}

    def share(cell: Mapping[str, float]) -> str:
        return f"{100 * cell['value']:.0f} %"

    finding = f"{name}: {share(asks)} of the ambiguous requests are asked about and {share(score)} end right; "
    finding += f"{other}: {share(other_asks)} and {share(other_score)}."
    return {"finding": finding[0].upper() + finding[1:]}


def show_asking(root: Path, stages: Sequence[str]) -> dict[str, Any]:
    """The share of replies to ambiguous openings that asked, by step; and an example from the last stage."""
    from upshot.core.files import read_jsonl
    from upshot.run.folder import ROLLOUTS
    from upshot.tasks.slots import asked_slots

    lines, example = [], None
    for name in stages:
        folder = _folder(name)
        asked: dict[int, list[bool]] = {}
        for reply in read_jsonl(root / folder / ROLLOUTS):
            replies = [message for message in reply["messages"][reply["opening"] :] if message["role"] == "assistant"]
            if reply["groups"].get("opening") != "ambiguous" or reply["opening"] > 1 or not replies:
                continue
            asks = bool(asked_slots(replies[0]["content"]))
            asked.setdefault(reply["step"], []).append(asks)
            futures = [future for future in reply["futures"] if future["messages"]]
            if asks and len(replies) == 1 and len(futures) > 1:
                example = [folder, reply["step"], reply["key"]]
        lines.append({"name": name, "x": [*asked], "y": [sum(replies) / len(replies) for replies in asked.values()]})
    curve = {"title": "asks, ambiguous first requests", "lines": lines}
    return {"curve": curve} | ({"example": example} if example else {})


def _evaluate(recipe: Recipe, checkpoint: Path) -> list[OpeningOutcome]:
    """Whole conversations of one model on the test split, all at once."""
    from upshot.rewards.metric import VerifierMetric

    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    metric, user = VerifierMetric(task), task.user()
    assert user is not None

    async def play_all() -> list[OpeningOutcome]:
        model, renderer = await start_policy(with_policy(recipe, checkpoint), task)
        policy = Policy(model, renderer, Sampling(recipe.episode.max_tokens, temperature=1.0))
        rows = task.rows("test")[:ROWS]
        return list(await asyncio.gather(*(_play(row, policy, user, metric, recipe.seed) for row in rows)))

    return asyncio.run(play_all())


async def _play(row: Row, policy: Policy, user: Participant, metric: Metric, seed: int) -> OpeningOutcome:
    """Did it end well, what did it cost, did the first reply ask?"""
    from upshot.tasks.slots import asked_slots

    conversation = Conversation(row, derive_seed(seed, "eval", row.id))

    async def play() -> None:
        if await policy.reply(conversation, role="eval") is None:
            raise NoRoom
        await play_future(conversation, user, policy, ROUNDS)

    failure = await catch_failure(play(), "conversation")
    if failure is not None:
        return OpeningOutcome(conversation, failure)
    score = await score_by(metric, conversation, "score")
    tokens = sum(len(sample.ids) for sample in conversation.samples())
    first = conversation.turns[len(row.messages)].message.content
    return OpeningOutcome(conversation, score, tokens, bool(asked_slots(first)))


def make_table(outcomes: dict[str, list[OpeningOutcome]], title: str) -> dict[str, Any]:
    """The table as data: one row per model, cells with 95 % intervals."""
    rows = [[name, *(_cell(mean) for mean in _columns(played))] for name, played in outcomes.items()]
    missing = sum(o.score.is_missing for played in outcomes.values() for o in played)
    note = "Mean over held-out goals with 95 % intervals; score 1 only if the final answer fits the whole goal."
    if missing:
        note += f" {missing} conversations have no score and are left out."
    return {"title": title, "columns": COLUMNS, "rows": rows, "note": note}


def _columns(outcomes: Sequence[OpeningOutcome]) -> list[Estimate | None]:
    def where(kind: str) -> list[OpeningOutcome]:
        return [o for o in outcomes if o.conversation.row.meta["opening"] == kind and not o.score.is_missing]

    ambiguous, clear = where("ambiguous"), where("unambiguous")
    return [
        estimate([o.score.value or 0.0 for o in ambiguous]),
        estimate([o.score.value or 0.0 for o in clear]),
        estimate([float(o.tokens) for o in [*ambiguous, *clear]]),
        estimate([float(o.asked) for o in ambiguous]),
        estimate([float(o.asked) for o in clear]),
    ]


def _cell(estimated: Estimate | None) -> Any:
    return "–" if estimated is None else {"value": estimated.mean, "low": estimated.low, "high": estimated.high}
