"""`upshot replay RUN STEP`: scores a finished step again from its files, with the recipe's current reward.

The policy samples nothing and nobody continues a conversation: replies and futures come from `rollouts.jsonl` and
`samples/`. Judges are called again. Decisions of an environment are kept. Baselines of classmates (`without-thought`,
`steps`) are not in the files; parts that need them are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.core.conversation import Conversation, Message, Row, Sample, Turn, messages_from
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.core.time_limit import call_seconds
from upshot.models.rendering import policy_renderer
from upshot.models.scripted import AbsentPolicy
from upshot.offline.job import run_all
from upshot.rewards.credit import Reward
from upshot.rollout.episode import Policy
from upshot.rollout.futures.classmates.map_file import classmate_names
from upshot.rollout.futures.talk import Futures
from upshot.rollout.play import RolloutContext
from upshot.rollout.reply import Future, Rollout
from upshot.rollout.services import build_context, build_services
from upshot.run.folder import ROLLOUTS, RunFolder
from upshot.tasks.base import tasks
from upshot.tasks.participants.tools import ACTS
from upshot.training.setup import find_tokenizer

AT_ONCE = 64
"""The number of replies scored concurrently."""


@dataclass(frozen=True)
class ScoreChange:
    """One number of a reply, before and now."""

    key: str
    """The key of the reply."""
    what: str
    """'reward', or a metric's name."""
    old: Score
    new: Score

    @property
    def same(self) -> bool:
        """Whether the values are equal, except for rounding."""
        if self.old.value is None or self.new.value is None:
            return self.old.value is self.new.value
        return abs(self.old.value - self.new.value) <= 1e-9 * max(1.0, abs(self.old.value))


def run(args: argparse.Namespace) -> int:
    """Replay and print; 0 if all numbers are unchanged, else 1."""
    folder = RunFolder.open(Path(args.folder))
    recipe = load_recipe(str(folder.path / "recipe.yaml"), args.overrides).recipe
    changes = asyncio.run(replay(folder, recipe, args.step))
    listed = [change for change in changes if not (args.changed and change.same)]
    for change in listed if args.json else ():
        scores = {"old": change.old.to_dict(), "new": change.new.to_dict(), "same": change.same}
        print(json.dumps({"key": change.key, "what": change.what, **scores}, default=str))
    if not args.json:
        _print_table(listed, changes)
    return 0 if all(change.same for change in changes) else 1


def _print_table(listed: Sequence[ScoreChange], changes: Sequence[ScoreChange]) -> None:
    wide = max((len(change.key) for change in listed), default=0)
    name = max((len(change.what) for change in listed), default=0)
    if listed:
        print(f"{'reply':<{wide}}  {'':<{name}}  {'old':>12}  {'new':>12}")
    for change in listed:
        old, new = (f"– {s.reason}" if s.value is None else f"{s.value:.4g}" for s in (change.old, change.new))
        print(f"{change.key:<{wide}}  {change.what:<{name}}  {old:>12}  {new:>12}{'' if change.same else '  changed'}")
    other = sum(not change.same for change in changes)
    result = f"{other} differ" if other else "none differs"
    print(f"{len({change.key for change in changes})} replies, {len(changes)} numbers: {result}")


async def replay(folder: RunFolder, recipe: Recipe, step: int) -> list[ScoreChange]:
    """Every mean and total of a step's replies, old and new."""
    lines = lines_of(folder, step)
    known = folder.samples(step)
    call_seconds.set(recipe.call_seconds)
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    rows = {row.id: row for row in task.rows("train")}
    tokenizer = find_tokenizer(recipe.model, task)
    services = build_services(recipe, task, AbsentPolicy(), tokenizer, policy_renderer(tokenizer, recipe))
    async with aclosing(services):
        silent = silent_models(recipe)
        for model in dict.fromkeys(model for name, model in services.models.items() if name not in silent):
            await model.start()
        context = build_context(recipe, services, Policy(AbsentPolicy()))

        async def one(line: Mapping[str, Any]) -> list[ScoreChange]:
            reply = read_reply(line, rows, known.get(line["key"], []))
            await score_again(context, reply)
            return compare(line, reply)

        return [change for changes in await run_all(lines, one, AT_ONCE) for change in changes]


def silent_models(recipe: Recipe) -> set[str]:
    """Helper models that only continue conversations, which a replay does not need."""
    user = recipe.futures.user
    speakers = {"user" if user is None else str(user.options.get("model", "user")), *classmate_names(recipe.futures)}
    judges = {"judge", *(str(metric.options.get("judge", "")) for metric in recipe.reward.metrics)}
    return speakers - judges


def lines_of(folder: RunFolder, step: int) -> list[dict[str, Any]]:
    """The replies of a step; `UserError` if the file has none."""
    lines = folder.rollouts
    replies = [line for line in lines if line.get("step") == step]
    if not replies:
        steps = sorted({line.get("step", 0) for line in lines})
        saved = f"steps {steps[0]} to {steps[-1]}" if steps else "no replies"
        raise UserError(f"'{folder.path / ROLLOUTS}' has no replies of step {step}; it has {saved}")
    return replies


async def score_again(context: RolloutContext, reply: Rollout) -> None:
    """Set the scores of the futures, and reward and credit of the reply."""
    futures: Futures = context.futures
    decided = context.decide(reply.conversation.turns[-1])
    if not reply.futures:  # the episode failed, or a rule decided the reward
        reply.reward = decided or reply.reward
        return
    await futures.rescore(reply)
    reply.reward, reply.credit = futures.score(reply)


def compare(line: Mapping[str, Any], reply: Rollout) -> list[ScoreChange]:
    """The numbers of a reply before and now."""
    before = line["reward"]
    pairs = [("reward", before["total"], reply.reward.total)]
    pairs += [(name, before["means"].get(name), mean) for name, mean in reply.reward.means.items()]
    return [ScoreChange(line["key"], what, _score(old), new) for what, old, new in pairs]


def read_reply(line: Mapping[str, Any], rows: Mapping[str, Row], sampled: Sequence[Sample]) -> Rollout:
    """The reply in a line of `rollouts.jsonl`, with its samples if they were kept."""
    spoken = [at for at, message in enumerate(line["messages"]) if message["role"] == "assistant"]
    opening = messages_from(line["messages"][: line.get("opening", spoken[0] if spoken else None)])
    stored = Row(line["row"], opening, line.get("goal"), line.get("reference"), line.get("source", ""))
    row = rows.get(line["row"], stored)
    conversation = Conversation(row, line.get("seed", 0), line["key"], _turns(line["messages"], sampled))
    conversation.ended = line.get("ended")
    decided = line.get("environment", {})
    if "score" in decided:
        conversation.score = Score.from_dict(decided["score"])
    if "turns" in decided:
        conversation.turn_scores = {int(at): _score(score) for at, score in decided["turns"].items()}
    conversation.session[ACTS] = decided.get("acts", [])
    means = {name: _score(mean) for name, mean in line["reward"]["means"].items()}
    reply = Rollout(conversation, line.get("group", 0), reward=Reward(_score(line["reward"]["total"]), means=means))
    # The episode up to each of the policy's turns.
    ends = [at for at, turn in enumerate(conversation.turns, 1) if turn.sample is not None]
    reply.turn_snapshots = [Conversation(row, conversation.seed, "", conversation.turns[:end]) for end in ends]
    reply.futures = [_future(future, conversation, rows) for future in line["futures"]]
    return reply


def _future(data: Mapping[str, Any], talk: Conversation, rows: Mapping[str, Row]) -> Future:
    shared = int(data.get("shared", len(talk.turns)))
    row = rows.get(data["row"], talk.row) if "row" in data else talk.row
    if data.get("cut") and "row" not in data:  # a classmate gets the messages before the reply
        row = replace(row, messages=tuple(turn.message for turn in talk.turns[:shared]))
    turns = (*talk.turns[:shared], *_turns(data["messages"], ()))
    conversation = Conversation(row, data.get("seed", 0), data["key"], turns)
    conversation.ended = data.get("ended")
    conversation.session, conversation.score = {**talk.session, ACTS: data.get("acts", [])}, talk.score
    span = data.get("span")
    place = (data.get("by", ""), data.get("turn", 0), data.get("cut", 0), (span[0], span[1]) if span else None)
    scores = {name: _score(score) for name, score in data["scores"].items()}
    path, forks = tuple(data.get("path", ())), tuple(data.get("forks", ()))
    return Future(conversation, shared, *place, data.get("missing"), scores, path, forks)


def _turns(messages: Sequence[Mapping[str, Any]], sampled: Sequence[Sample]) -> tuple[Turn, ...]:
    """Turns of a transcript. If a policy turn's ids were not kept, placeholder ids of the same number replace them."""
    left = iter(sampled)
    out = []
    for message in messages:
        sample = None
        if "finish" in message:
            count = int(message["tokens"])
            blank = Sample((), (-1,) * count, (0.0,) * count, message["finish"])
            sample = next(left, blank) if message.get("trained") else blank
        out.append(Turn(Message.from_dict(message), sample, message.get("note") or {}))
    return tuple(out)


def _score(data: Mapping[str, Any] | None) -> Score:
    return Score.from_dict(data) if data else Score.missing("not_scored")
