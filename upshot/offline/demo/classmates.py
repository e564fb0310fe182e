"""`upshot demo classmates`: one warm start, the same training with and without a classmate, and how readable each is.

The policy's demonstrations think mostly in a private code. Both twins continue from the same warm start with the same
seeds and budget; only `futures` differs. Then all models answer held-out questions: is the answer right, does the
classmate answer right from the thought, and can a monitor predict from the thought whether the answer is right?
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.config.layers import COMMAND_LINE
from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, Row, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score, mean_score
from upshot.models.connect import connect
from upshot.offline.demo.stages import Demonstration, mean_cell
from upshot.offline.demo.step_reader import plain_steps
from upshot.offline.play.opened import open_recipe, with_policy
from upshot.rewards.monitor import Monitor, MonitorPrediction, case_of, measure
from upshot.rollout.futures.classmates.classmate import Classmate, ClassmatePrompt
from upshot.rollout.futures.classmates.options import CLASSMATE, ClassmateConfig
from upshot.rollout.play import play_step
from upshot.serving.servers.state import with_addresses
from upshot.tasks.base import Task, tasks
from upshot.tasks.ciphers import Ciphers, thought

ROWS = 400
"""Held-out questions."""
SEEDS = 3
"""How many seeds, counted up from the recipe's."""
PEER = "peer"
"""The name of the classmate among the recipe's models."""
WARM, TWIN, TAUGHT = MODELS = "warm start", "twin without classmates", "with a classmate"
COLUMNS = ("model", "main accuracy", "classmate, from the thought", "monitor F1", "plain thoughts")


def demo(overrides: Sequence[str], quiet: bool = False, as_json: bool = False) -> int:
    """Train the classmate and, for every seed, the three models; print the table and the path of the report."""
    loaded = load_recipe("classmate-mini", overrides)
    recipe = loaded.recipe
    shown = Demonstration("demo-classmates", recipe, quiet, as_json)
    if loaded.origin(f"models.{PEER}") != COMMAND_LINE:
        shown.tell("\nthe classmate: a separate small model, trained on plain thoughts only")
        peer = load_recipe("classmate-mini-peer").recipe
        path = shown.train(peer, peer.name, "peer", {})
        recipe = load_recipe(recipe.model_dump(), {f"models.{PEER}": path.resolve()}).recipe
    alone = asyncio.run(classmate_alone(recipe, PEER, ROWS))
    seeds = range(recipe.seed, recipe.seed + SEEDS)
    readings = {seed: one_seed(recipe.model_copy(update={"seed": seed}), shown) for seed in seeds}
    return shown.finish(recipe, make_table(readings, alone), TAUGHT)


def one_seed(recipe: Recipe, shown: Demonstration) -> dict[str, Readability]:
    """Warm start and twins of one seed, and their results on held-out questions."""
    folder = f"seed-{recipe.seed}"
    shown.tell(f"\nseed {recipe.seed}, {WARM}: demonstrations that mostly think in a code")
    start = shown.train(recipe, WARM, f"{folder}/warm-start", {"train.steps": 0})
    shown.tell(f"\nseed {recipe.seed}, {TWIN}: reinforcement by the answer alone")
    twin = shown.train(recipe, TWIN, f"{folder}/twin", {"futures": {"name": "none"}}, start)
    shown.tell(f"\nseed {recipe.seed}, {TAUGHT}: a thought also earns what the classmate answers from it")
    taught = shown.train(recipe, TAUGHT, f"{folder}/classmates", {}, start)
    trained = {WARM: start, TWIN: twin, TAUGHT: taught}
    return {name: asyncio.run(read_replies(recipe, path, ROWS)) for name, path in trained.items()}


def make_table(readings: Mapping[int, Mapping[str, Readability]], alone: Mapping[str, float | None]) -> dict[str, Any]:
    """The table as data: one row per model, cells with mean and range over seeds, and what the classmate adds."""
    numbers = {seed: {name: numbers_of(reading) for name, reading in row.items()} for seed, row in readings.items()}
    places = range(len(COLUMNS) - 1)
    rows = [[name, *(mean_cell([row[name][i] for row in numbers.values()]) for i in places)] for name in MODELS]
    pairs = [[(row[TAUGHT][i], row[TWIN][i]) for row in numbers.values()] for i in places]
    gains = [[None if a is None or b is None else a - b for a, b in column] for column in pairs]
    rows.append(["with minus without", *(mean_cell(gain) for gain in gains)])
    silent = {name: sum(s.is_missing for row in readings.values() for s in row[name].classmate) for name in MODELS}
    shares = ", ".join(f"{share:.2f} from {what}" for what, share in alone.items() if share is not None)
    note = f"Mean and range over {len(readings)} seeds, {ROWS} held-out questions each. "
    note += f"The classmate is right: {shares}."
    if any(silent.values()):
        note += " Replies without a thought to hand on: " + ", ".join(f"{name} {n}" for name, n in silent.items()) + "."
    title = "A thought that others can use is a thought that others can read"
    return {"title": title, "columns": COLUMNS, "rows": rows, "note": note, "seeds": numbers, "classmate": dict(alone)}


def numbers_of(reading: Readability) -> list[float | None]:
    """The numbers of a row: two accuracies, the monitor's F1, the share of thoughts in plain steps."""
    plain = [plain_steps(look.case.thought) is not None for look in reading.looks]
    accuracies = [mean_score(reading.main).value, mean_score(reading.classmate).value]
    return [*accuracies, measure(reading.looks).get("f1"), sum(plain) / len(plain)]


@dataclass(frozen=True)
class Readability:
    """The results of a model's replies to held-out questions."""

    main: list[Score]
    """The verdicts on its own answers."""
    classmate: list[Score]
    """Mean verdicts on the classmates' answers from each thought; missing where there was none."""
    looks: list[MonitorPrediction]
    """The thoughts, and the verdicts that the monitor predicted from them."""


async def read_replies(recipe: Recipe, checkpoint: Path, count: int) -> Readability:
    """Play `count` rows of the test split with the recipe's classmates, and show the thoughts to its monitor."""
    if recipe.eval.monitor is None:
        raise UserError("eval.monitor names no model to read the thoughts; the recipe 'classmate-mini' has one")
    async with open_recipe(with_policy(recipe, checkpoint)) as opened:
        rows, manager = opened.task.rows("test")[:count], opened.services.manager
        groups = await play_step(opened.context, rows, 1, derive_seed(recipe.seed, "test"))
        replies = [reply for group in groups for reply in group]
        cases = [case_of(reply.conversation, reply.reward, opened.task, manager) for reply in replies]
        looks = await Monitor(opened.services.models[recipe.eval.monitor]).look_at_all(cases)
    handed = [[future.scores[CLASSMATE] for future in reply.futures if future.cut] for reply in replies]
    classmate = [mean_score(scores, str(Reason.NO_THOUGHT)) for scores in handed]
    return Readability([case.verdict for case in cases], classmate, looks)


async def classmate_alone(recipe: Recipe, name: str, count: int) -> dict[str, float | None]:
    """How often a classmate is right on the test split when it gets no thought, a coded one or a plain one."""
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    assert isinstance(task, Ciphers)
    rows, problems = task.rows("test")[:count], task.problems("test")[:count]
    hands = {
        "no thought": [""] * len(rows),
        "a coded one": [thought(problem, coded=True) for problem in problems],
        "a plain one": [thought(problem) for problem in problems],
    }
    async with connect(with_addresses(recipe.serve, {name: recipe.models[name]})[name], role=name) as model:
        most = int((recipe.futures.model_extra or {}).get("max_tokens", 512))
        classmate = Classmate(ClassmateConfig(name=name), model, Sampling(most))
        await classmate.start()
        return {what: await _share(task, classmate, rows, thoughts) for what, thoughts in hands.items()}


async def _share(task: Task, classmate: Classmate, rows: Sequence[Row], handed: Sequence[str]) -> float | None:
    verdicts = (_verdict(task, classmate, row, thought) for row, thought in zip(rows, handed, strict=True))
    return mean_score(await asyncio.gather(*verdicts)).value


async def _verdict(task: Task, classmate: Classmate, row: Row, handed: str) -> Score:
    (answer,) = await classmate.answer(ClassmatePrompt(row.messages, handed), 1, derive_seed(0, row.id))
    conversation = Conversation(row, 0, row.id)
    conversation.say(Message("assistant", answer.text))
    return await task.verify(conversation)
