"""Text environments with Gymnasium's interface: `reset` opens, each turn of the policy is a `step`, the return is the
score.

Gymnasium's own ids, OpenEnv's clients (reset and step are awaited, a result has observation, reward and done), single
player games of TextArena, or your own class with `reset` and `step`. Each conversation has its own object, which is
closed with it. If an environment raises or hangs, or its server is gone, its episode is missing.

Not supported: observations other than text (unless you give `show`), vectors of environments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from upshot.config.bounds import Made, Words
from upshot.config.registry import import_thing
from upshot.core.conversation import Conversation, Message, Row, derive_seed
from upshot.core.errors import UserError, import_optional
from upshot.core.score import Score
from upshot.core.time_limit import limit_call, limit_call_now
from upshot.tasks.base import Task, last_reply, tasks
from upshot.tasks.participants.base import Observation, Participant

KEY = "gymnasium"
"""The key of a session's environment."""
ARENA = "textarena:"


class LiveEnvironment:
    """The environment of one conversation; copies of the conversation never step it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.total = 0.0

    def __deepcopy__(self, _: Mapping[int, Any]) -> LiveEnvironment:
        return self


class TextEnvironment(Participant):
    """Steps the environment of each conversation with what the policy says."""

    def __init__(self, make: Callable[[], Any], act: Callable[[str], Any], show: Callable[[Any], str]) -> None:
        self.make, self.act, self.show = make, act, show

    async def start(self, conversation: Conversation) -> None:
        """Create it and say its first observation."""
        live = LiveEnvironment(self.make())
        conversation.session[KEY] = live
        result = await limit_call(live.inner, live.inner.reset, seed=conversation.row.meta["seed"])
        seen = result[0] if isinstance(result, tuple) else getattr(result, "observation", result)
        conversation.say(Message("user", self.show(seen)))

    async def observe(self, conversation: Conversation) -> Observation:
        """One step; an action that makes no sense is answered with the reason and does not count as a step."""
        live: LiveEnvironment = conversation.session[KEY]
        try:
            action = self.act(last_reply(conversation))
        except ValueError as error:
            return Observation((Message("user", f"no action: {error}"),), metrics={"no_action": 1.0})
        seen, reward, done = read_step(await limit_call(live.inner, live.inner.step, action))
        live.total += reward
        text = self.show(seen)
        return Observation((Message("user", text),) if text else (), done, "done", metrics={"steps": 1.0})

    async def end(self, conversation: Conversation) -> None:
        """Close it; the sum of its rewards is the conversation's score."""
        live: LiveEnvironment | None = conversation.session.pop(KEY, None)
        if live is None:
            return
        conversation.score = Score(live.total)
        if hasattr(live.inner, "close"):
            await limit_call(live.inner, live.inner.close)


def read_step(result: Any) -> tuple[Any, float, bool]:
    """Observation, reward, and whether the episode is over, from any of the forms that `step` returns."""
    if isinstance(result, tuple) and len(result) == 5:
        seen, reward, terminated, truncated, _ = result
        return seen, float(reward or 0), bool(terminated or truncated)
    if isinstance(result, tuple) and len(result) == 4:
        return result[0], float(result[1] or 0), bool(result[2])
    if hasattr(result, "observation") and hasattr(result, "done"):
        return result.observation, float(getattr(result, "reward", None) or 0), bool(result.done)
    raise TypeError(f"step returned {type(result).__name__}, not (observation, reward, terminated, truncated, info)")


class ArenaGame:
    """A single-player game of TextArena with Gymnasium's interface."""

    def __init__(self, name: str, **options: Any) -> None:
        import textarena

        self.game = textarena.make(env_id=name, **options)

    async def reset(self, seed: int) -> str:
        """Its rules and first position."""
        limit_call_now(self.game, self.game.reset, num_players=1, seed=seed)
        return str(self.game.get_observation()[1])

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """One move."""
        done, info = limit_call_now(self.game, self.game.step, action)
        if not done:
            return str(self.game.get_observation()[1]), 0.0, False, info
        rewards, _ = self.game.close()
        return "", float(rewards.get(0, 0.0)), True, info


def _show(seen: Any) -> str:
    """An observation as text: a string as it is, an object with fields as JSON."""
    if isinstance(seen, str):
        return seen
    if hasattr(seen, "model_dump"):
        seen = {name: value for name, value in seen.model_dump().items() if name not in ("done", "reward", "metadata")}
    return json.dumps(seen, default=str)


def _number(text: str) -> int:
    number = re.search(r"-?\d+", text)
    if number is None:
        raise ValueError("say the number of an action")
    return int(number[0])


@tasks.register("gymnasium", "openenv")
class GymnasiumTask(Task):
    """Episodes of an environment, one per seed."""

    def __init__(
        self,
        env: Words,
        arguments: Mapping[str, Any] | None = None,
        action: str = "text",
        show: str = "",
        system: str = "",
        episodes: Made = 256,
        words: Sequence[str] = (),
    ) -> None:
        """Make the task.

        env: an id of Gymnasium's, 'textarena:GAME', or 'my_pkg.module:make', called with `arguments` for every episode.
        action: what a step is given: 'text' (the policy's words), 'number' (the first in them), or 'module:function'.
        show: 'module:function' from an observation to text. episodes: seeds of each split, which share none.
        words: of the environment's own little language, for a new tiny model.
        """
        self.env, self.system, self.episodes, self.words = env, system, episodes, words
        self._arguments = dict(arguments or {})
        known: dict[str, Callable[[str], Any]] = {"text": str, "number": _number}
        act = known.get(action) or import_thing(action, "action", "task.action")
        self._environment = TextEnvironment(self._make, act, import_thing(show, "show", "task.show") if show else _show)

    def _make(self) -> Any:
        if self.env.startswith(ARENA):
            return ArenaGame(self.env.removeprefix(ARENA), **self._arguments)
        if ":" in self.env:
            return import_thing(self.env, "environment", "task.env")(**self._arguments)
        sentence = f"task.env '{self.env}' is an id of Gymnasium's: pip install gymnasium"
        gymnasium = import_optional("gymnasium", sentence)
        try:
            return gymnasium.make(self.env, **self._arguments)
        except gymnasium.error.Error as error:
            raise UserError(f"task.env '{self.env}': {error}") from error

    def rows(self, split: str) -> Sequence[Row]:
        """One row per seed; the environment opens."""
        opens = (Message("system", self.system),) if self.system else ()
        seeds = [derive_seed(number, split) % (1 << 31) for number in range(self.episodes)]
        return [Row(f"{split}-{n}", opens, source=self.env, meta={"seed": seed}) for n, seed in enumerate(seeds)]

    def environment(self) -> Participant:
        """The environment."""
        return self._environment

    def vocabulary(self) -> Sequence[str]:
        """The environment's own words."""
        return sorted({word for text in self.words for word in text.split()})
