"""What classmates reach without any thought: asked once for each row and classmate, whoever needs it first."""

from __future__ import annotations

import asyncio

from upshot.core.conversation import Conversation, Row, derive_seed
from upshot.core.score import Score
from upshot.rollout.futures.classmates.classmate import Classmate, ClassmatePrompt
from upshot.rollout.futures.classmates.options import CLASSMATE
from upshot.rollout.futures.classmates.panel import Panel

KEPT_STATES = 8


class Baselines:
    """Scores without a thought, by classmate and row. The replies of a group wait for the same question.

    A classmate that is a renewed copy of the policy has others in each of its states. Steps under way may ask for those
    of earlier ones, but not of long ago.
    """

    def __init__(self, panel: Panel, seed: int) -> None:
        self.panel = panel
        self.seed = seed
        """The run's: a baseline is the same for all replies to a row, so no reply's own seed will do."""
        self._tasks: dict[tuple[str, int, str], asyncio.Task[list[Score]]] = {}

    async def ask(self, row: Row) -> None:
        """See that every classmate's baseline of a row is known, where it can be had."""
        await asyncio.gather(*(self._ask_once(row, classmate) for classmate in self.panel.classmates))

    async def _ask_once(self, row: Row, classmate: Classmate) -> list[Score]:
        state = classmate.model.state_now
        key = (classmate.name, state, row.id)
        self._forget(classmate.name, state - KEPT_STATES)
        if key not in self._tasks:
            self._tasks[key] = asyncio.ensure_future(self._ask(row, classmate))
        task = self._tasks[key]
        try:
            # One reply that is cancelled must not take the answer from the others that wait for it.
            return await asyncio.shield(task)
        finally:
            failed = task.done() and (task.cancelled() or task.exception() or any(s.is_missing for s in task.result()))
            if failed and self._tasks.get(key) is task:
                del self._tasks[key]  # what failed is asked again; what is known stays

    async def _ask(self, row: Row, classmate: Classmate) -> list[Score]:
        seed = derive_seed(self.seed, "without", classmate.name, row.id)
        conversation = Conversation(row, seed, f"{row.id}/{classmate.name}/without")
        futures = await self.panel.ask(classmate, ClassmatePrompt(row.messages, "", "answer"), conversation)
        return [future.scores[CLASSMATE] for future in futures]

    def known(self, row: Row) -> dict[str, list[Score]]:
        """The baselines of a row, as far as they are known."""
        tasks = {c.name: self._tasks.get((c.name, c.model.state_now, row.id)) for c in self.panel.classmates}
        return {name: task.result() for name, task in tasks.items() if task is not None and task.done()}

    def _forget(self, name: str, before: int) -> None:
        for key in [key for key in self._tasks if key[0] == name and key[1] < before]:
            del self._tasks[key]

    def close(self) -> None:
        """Forget them all; what is still being asked is given up."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
