"""What classmates reach without any thought: asked once for each talk and classmate, when it is first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from upshot.core.conversation import Conversation, Row, derive_seed
from upshot.core.score import Score
from upshot.rollout.futures.classmates.classmate import Classmate, ClassmatePrompt
from upshot.rollout.futures.classmates.options import CLASSMATE
from upshot.rollout.futures.classmates.panel import Panel

KEPT_STATES = 8


class Baselines:
    """Scores without a thought, by classmate and by what is asked. The replies of a group wait for the same question.

    What is asked is the whole talk before the reply, as it is with the thought: in an episode of several turns the
    difference would otherwise be that of two questions. A classmate that is a renewed copy of the policy has others in
    each of its states: steps under way may ask for those of earlier ones, but not of long ago.
    """

    def __init__(self, panel: Panel, seed: int) -> None:
        self.panel = panel
        self.seed = seed
        """The run's: a baseline is the same for all replies to a row, so no reply's own seed will do."""
        self._scores: dict[str, list[Score]] = {}
        self._tasks: dict[str, asyncio.Task[list[Score]]] = {}

    async def ask(self, asked: Row) -> None:
        """See that every classmate's baseline is known, where it can be had; `asked`: the row with the talk so far."""
        await asyncio.gather(*(self._ask_once(asked, classmate) for classmate in self.panel.classmates))

    async def _ask_once(self, asked: Row, classmate: Classmate) -> None:
        self._forget(classmate)
        key = _key(classmate, asked)
        if any(not score.is_missing for score in self._scores.get(key, ())):
            return  # a sample that is missing leaves the mean of the others; only what failed as a whole is asked again
        if key not in self._tasks:
            self._tasks[key] = asyncio.ensure_future(self._ask(asked, classmate))
        task = self._tasks[key]
        try:
            # One reply that is cancelled must not take the answer from the others that wait for it.
            self._scores[key] = await asyncio.shield(task)
        finally:
            if task.done() and self._tasks.get(key) is task:
                del self._tasks[key]

    async def _ask(self, asked: Row, classmate: Classmate) -> list[Score]:
        seed = derive_seed(self.seed, "without", classmate.name, asked.id)
        conversation = Conversation(asked, seed, f"{asked.id}/{classmate.name}/without")
        futures = await self.panel.ask(classmate, ClassmatePrompt(asked.messages, "", "answer"), conversation)
        return [future.scores[CLASSMATE] for future in futures]

    def known(self, asked: Row) -> dict[str, list[Score]]:
        """The baselines of what was asked, as far as they are known."""
        scores_of = {c.name: self._scores.get(_key(c, asked)) for c in self.panel.classmates}
        return {name: scores for name, scores in scores_of.items() if scores is not None}

    def _forget(self, classmate: Classmate) -> None:
        """Let go of what the classmate said in states of long ago."""
        oldest = classmate.model.state_now - KEPT_STATES
        for key in [
            key for key in self._scores if key.startswith(f"{classmate.name}\n") and int(key.split("\n")[1]) < oldest
        ]:
            del self._scores[key]

    def state(self) -> dict[str, Any]:
        """What is known, so that a resumed run asks nothing twice."""
        return {key: [score.to_dict() for score in scores] for key, scores in self._scores.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what was known."""
        self._scores = {key: [Score.from_dict(score) for score in scores] for key, scores in state.items()}

    def close(self) -> None:
        """Forget them all; what is still being asked is given up."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._scores.clear()


def _key(classmate: Classmate, asked: Row) -> str:
    """Who was asked, in which state, and what."""
    digest = derive_seed(0, [(message.role, message.content) for message in asked.messages])
    return f"{classmate.name}\n{classmate.model.state_now}\n{asked.id}\n{digest:x}"
