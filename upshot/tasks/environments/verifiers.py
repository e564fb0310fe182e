"""Environments of the library `verifiers` (its v1): their tasks are the rows, their rollouts the episodes, their
rewards the outcome.

The environment plays: its harness calls the policy at the address of its own conversation, so multi-turn games, tools
and several agents are as their authors wrote them, and every call is recorded. What is not here: environments of
verifiers before v1 (`load_environment` with a Rubric object), and runtimes other than those that `verifiers` brings.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from typing import Any

from upshot.config.bounds import Made, Share, Whole, Words
from upshot.config.trust import check_trust
from upshot.core.conversation import Message, Row
from upshot.core.errors import UserError, import_optional
from upshot.core.score import Reason, Score
from upshot.tasks.base import Task, tasks
from upshot.tasks.datasets.splits import split_in_three
from upshot.tasks.environments.agent import AgentEpisode, AgentFunction

MISSING = "task 'verifiers' needs the library: pip install 'verifiers>=0.4' (and the environment's own package)"


@tasks.register("verifiers")
class VerifiersTask(Task):
    """One environment by its id, as `verifiers` finds it: a package that exports its Taskset."""

    def __init__(
        self,
        env: Words,
        taskset: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        harness: str = "null",
        rows: Made = 1000,
        held_out: Share = 0.1,
        seed: Whole = 0,
    ) -> None:
        """Make the task.

        env: the taskset's id. taskset: its own settings. config: the rest of verifiers' `[env]` block.
        harness: the program of roles that name none; null: chat with the taskset's tools; '': the taskset's own choice.
        rows: most tasks that are read. held_out: the share of them for validation, and for test.
        """
        self.env = env
        self._limit, self._held_out, self._seed = rows, held_out, seed
        self._config = {**(config or {}), "taskset": {**(taskset or {}), "id": env}}
        self._harness = harness
        self._stack = AsyncExitStack()
        self._gate = asyncio.Lock()
        self._playing = 0

    @cached_property
    def _environment(self) -> Any:
        check_trust(self.env, "environment", "task.env")
        vf = import_optional("verifiers.v1", MISSING)
        try:
            kind = vf.env_config_type(self.env, self._config.get("id", ""))
            seat = {"runtime": {"type": "subprocess"}} | ({"harness": {"id": self._harness}} if self._harness else {})
            roles = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
            seats = {name: {**seat, **self._config.get(name, {})} for name in roles}
            return vf.load_environment(vf.resolve_env_config({**self._config, **seats}))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"task 'verifiers', env '{self.env}': {error}") from error

    @cached_property
    def _tasks(self) -> dict[str, Any]:
        tasks_by_id = {f"{self.env}-{task.data.idx}": task for task in self._environment.taskset.take(self._limit)}
        if not tasks_by_id:
            raise UserError(f"task 'verifiers', env '{self.env}': its taskset is empty")
        return tasks_by_id

    @cached_property
    def _splits(self) -> dict[str, list[Row]]:
        rows = [Row(key, _opening(task.data), source=self.env) for key, task in self._tasks.items()]
        return split_in_three({"train": rows}, self._held_out, self._seed)

    def rows(self, split: str) -> Sequence[Row]:
        """The taskset's tasks."""
        return self._splits.get(split, [])

    def agent(self) -> AgentFunction:
        """The environment itself."""
        return self._play

    async def _play(self, episode: AgentEpisode) -> Score:
        """One rollout of the environment: the sum of its rewards, missing where it failed."""
        import verifiers.v1 as vf

        # Its client sends its own key as the bearer's; ours is sent in the other header.
        client = vf.EvalClientConfig(
            base_url=episode.base_url, api_key_var="UPSHOT_NO_KEY", headers={"x-api-key": episode.api_key}
        )
        context = vf.ModelContext(episode.model, client, vf.Sampling())
        async with self._serving():
            played = await self._environment.run_episode(self._tasks[episode.row.id], context)
        if not played.ok:
            faults = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            reasons = "; ".join(f"{fault.type}: {fault.message}" for fault in faults)
            return Score.missing(Reason.ERROR, f"verifiers: {reasons or 'the episode failed'}"[:300])
        worth = math.fsum(trace.reward for trace in played.traces)
        return Score(worth, detail={"rewards": {n: r.value for t in played.traces for n, r in t.rewards.items() if r}})

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """Keep what episodes share (tool servers, verifiers' own proxy) running while any episode of a step is played.

        Its proxy keeps a client for every address until it is stopped, and every episode has its own address: if it
        kept running, the run would grow by a megabyte per episode.
        """
        async with self._gate:
            if not self._playing:
                await self._stack.enter_async_context(self._environment.serving())
            self._playing += 1
        try:
            yield
        finally:
            async with self._gate:
                self._playing -= 1
                if not self._playing:
                    await self._stack.aclose()


def _opening(data: Any) -> tuple[Message, ...]:
    """The first messages to the policy; the environment itself sends them."""
    texts = {"system": data.system_prompt, "user": data.prompt_text}
    return tuple(Message(role, text) for role, text in texts.items() if text)
