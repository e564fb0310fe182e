"""Several tasks in one training run, each with a weight: the share of its rows in the mix."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from upshot.config.bounds import Positive, Whole
from upshot.config.validation import check_value
from upshot.core.conversation import Conversation, Message, Row, Tools, derive_seed
from upshot.core.errors import UserError, close_all
from upshot.core.score import Score
from upshot.core.time_limit import limit_call, limit_call_now
from upshot.tasks.base import Task, groups_of, tasks
from upshot.tasks.participants.base import Observation, Participant
from upshot.tasks.verifiers.base import Claim

KEY = "mix_task"
"""Where a row's meta says which of the tasks it belongs to."""


@tasks.register("mix")
class Mix(Task):
    """`tasks: [{name: gsm8k, weight: 2, …}, {name: code, …}]`; other keys are the options of each."""

    def __init__(self, tasks: Sequence[Mapping[str, Any]], seed: Whole = 0) -> None:
        """tasks: each with its name, weight (default 1) and options; `as` renames a task, so that one kind can occur
        twice."""
        if not tasks:
            raise UserError("task 'mix' needs at least one task under 'tasks'")
        self.parts: dict[str, Task] = {}
        self.weights: dict[str, float] = {}
        self.seed = seed
        self._rows: dict[str, list[Row]] = {}
        for number, entry in enumerate(tasks):
            self._add(dict(entry), f"task.tasks.{number}")

    def _add(self, entry: dict[str, Any], where: str) -> None:
        if "name" not in entry:
            raise UserError(f"{where} names no task")
        kind = str(entry.pop("name"))
        name = str(entry.pop("as", kind))
        self.weights[name] = check_value(f"{where}.weight", entry.pop("weight", 1.0), Positive)
        if name in self.parts:
            raise UserError(f"{where} is a second '{name}'; give it another name with 'as'")
        self.parts[name] = tasks.create(kind, entry, where)

    def rows(self, split: str) -> Sequence[Row]:
        """Rows of all tasks, by weight: in any stretch each task has about its share."""
        if split not in self._rows:
            pools = {name: [_mark(row, name) for row in part.rows(split)] for name, part in self.parts.items()}
            self._rows[split] = interleave(pools, self.weights, derive_seed(self.seed, split))
        return self._rows[split]

    def sources(self) -> list[str]:
        """Those of all tasks."""
        return [source for part in self.parts.values() for source in part.sources()]

    def part(self, row: Row) -> Task:
        """The task a row belongs to."""
        return self.parts[str(row.meta[KEY])]

    def environment(self) -> Participant:
        """Each row's own environment."""
        return _Environments({name: part.environment() for name, part in self.parts.items()})

    def user(self) -> Participant | None:
        """Each row's own user, where all tasks have one."""
        users = {name: part.user() for name, part in self.parts.items()}
        return None if None in users.values() else _Environments(users)

    def claim(self, conversation: Conversation) -> Claim | None:
        """The claim of the row's own task."""
        part = self.part(conversation.row)
        return limit_call_now(part, part.claim, conversation)

    async def verify(self, conversation: Conversation) -> Score:
        """The verdict of the row's own task."""
        part = self.part(conversation.row)
        return Score.of(await limit_call(part, part.verify, conversation), f"task '{part.name}'")

    def format_faults(self, conversation: Conversation) -> list[str]:
        """By the form of the row's own task."""
        part = self.part(conversation.row)
        return limit_call_now(part, part.format_faults, conversation)

    def dialogues(self, split: str) -> Sequence[tuple[Message, ...]]:
        """The dialogues of all tasks."""
        return [dialogue for part in self.parts.values() for dialogue in part.dialogues(split)]

    def vocabulary(self) -> Sequence[str]:
        """The words of all tasks, if every one of them has its own little language."""
        words = [set(part.vocabulary()) for part in self.parts.values()]
        return sorted(set().union(*words)) if all(words) else []

    def tools(self) -> Tools:
        """The tools of all tasks."""
        named = {tool["function"]["name"]: tool for part in self.parts.values() for tool in part.tools()}
        return list(named.values())

    def groups(self, row: Row) -> Mapping[str, str]:
        """The task, and the groups of the row's own."""
        return {**groups_of(self.part(row), row), "task": str(row.meta[KEY])}

    async def aclose(self) -> None:
        """Close all tasks."""
        await close_all(self.parts.values())


class _Environments(Participant):
    """Hands each conversation to its task's own participant; a row without one ends after one turn."""

    def __init__(self, parts: Mapping[str, Participant | None]) -> None:
        self.parts = parts
        self.forks = all(part is None or part.forks for part in parts.values())

    def answers_calls(self, row: Row | None = None) -> bool:
        asked = self.parts.values() if row is None else [self.parts[str(row.meta[KEY])]]
        return any(part is not None and part.answers_calls(row) for part in asked)

    def _of(self, conversation: Conversation) -> Participant | None:
        return self.parts[str(conversation.row.meta[KEY])]

    async def start(self, conversation: Conversation) -> None:
        if (part := self._of(conversation)) is not None:
            await limit_call(part, part.start, conversation)

    async def observe(self, conversation: Conversation) -> Observation:
        part = self._of(conversation)
        return await limit_call(part, part.observe, conversation) if part is not None else Observation(done=True)

    async def end(self, conversation: Conversation) -> None:
        if (part := self._of(conversation)) is not None:
            await limit_call(part, part.end, conversation)

    async def aclose(self) -> None:
        await close_all(self.parts.values())


def interleave(pools: Mapping[str, Sequence[Row]], weights: Mapping[str, float], seed: int) -> list[Row]:
    """Rows of all pools in the proportion of the weights.

    As long as the largest share of any pool lasts; smaller pools are reshuffled and repeated (with ids of their own).
    """
    pools = {name: rows for name, rows in pools.items() if rows}
    total = sum(weights[name] for name in pools)
    length = round(max((len(rows) * total / weights[name] for name, rows in pools.items()), default=0))
    rng = random.Random(seed)
    decks = {name: _deal(rows, rng) for name, rows in pools.items()}
    debt = dict.fromkeys(pools, 0.0)
    out: list[Row] = []
    for _ in range(length):
        for name in pools:
            debt[name] += weights[name] / total
        name = max(debt, key=lambda n: debt[n])
        debt[name] -= 1
        out.append(next(decks[name]))
    return out


def _deal(rows: Sequence[Row], rng: random.Random) -> Iterator[Row]:
    """The rows without end, shuffled anew for every round; from the second round on with ids of their own."""
    for turn in count(1):
        for row in reversed(rng.sample(list(rows), len(rows))):
            yield row if turn == 1 else replace(row, id=f"{row.id}~{turn}")


def _mark(row: Row, name: str) -> Row:
    return replace(row, id=f"{name}/{row.id}", meta={**row.meta, KEY: name})
