"""The helpers of a run: started for a phase that samples, counted step by step, and counted further after a resume."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from upshot.config.recipe import Recipe
from upshot.models.connect import share_endpoints
from upshot.rollout.play import RolloutContext
from upshot.rollout.services import Services, build_context, build_services
from upshot.run.folder import RunFolder
from upshot.run.writer import Logs
from upshot.serving.swap.pool import ModelPool
from upshot.training.bundle import PolicyBundle
from upshot.training.learner.distributed.ranks import Ranks, add_counts
from upshot.training.learner.memory.fit import configure_helpers


class RunServices:
    """Opens the helpers of a run and keeps their counts, over all ranks and resumes."""

    def __init__(self, recipe: Recipe, folder: RunFolder, ranks: Ranks) -> None:
        self.recipe, self.folder, self.ranks = recipe, folder, ranks
        self.counters: dict[str, Any] = {}
        """The helpers' counters after the last finished step; an unfinished step is played again, and counted then."""
        self._open: Services | None = None
        self._policy: PolicyBundle | None = None
        self._summed: dict[str, Any] = {}
        """The counters when the ranks' were last added up."""
        self._counted: tuple[Logs, dict[str, Any]] = {}, {}
        """Of the step under way: numbers for its line, and the counters behind them."""

    @asynccontextmanager
    async def open(
        self, policy: PolicyBundle, resumed_from: Path | None
    ) -> AsyncIterator[tuple[Services, RolloutContext]]:
        """Helper models, user and metrics, started, with the context they play in; closed at the end."""
        layout = policy.memory.layout
        policy.pool = None if layout is None else ModelPool(layout, policy.module.device)
        policy.sampler.play_ahead(self.recipe.train.async_steps)
        recipe = configure_helpers(self.recipe, policy.memory)
        services = build_services(recipe, policy.task, policy.sampler, policy.tokenizer, policy.renderer, policy.pool)
        share_endpoints(services.models.values(), self.ranks.size)
        self._open, self._policy = services, policy
        if spent := self.folder.spent():
            services.budget.restore(spent)
        self.ranks.share(services.budget)
        services.restore(self.counters)
        self._summed = services.counters()
        if resumed_from is not None:
            policy.sampler.load_copies(resumed_from)
        try:
            await policy.sampler.start()
            await services.start()
            yield services, build_context(self.recipe, services, policy.speaker())
        finally:
            self._open = None
            await services.aclose()
            if policy.pool is not None:
                await policy.pool.aclose()
                policy.pool = None
            await policy.sampler.disconnect()
            self.folder.write_spent(services.budget.state())

    async def pause(self) -> None:
        """Called when the current step is played: what its helpers have counted goes into its line, and engine and
        helpers free memory for the learner where the memory plan says so."""
        if self._open is None or self._policy is None:
            return
        if self.ranks.size > 1:
            self._summed = add_counts(self._summed, self.ranks.all_gather_object("count", self._open.counters()))
            self._open.restore(self._summed)
        self._counted = self._open.stats(), self._open.counters()
        policy = self._policy
        if policy.pool is not None and policy.memory.setting.helpers == "leave":
            policy.pool.rest()
        await policy.sampler.rest(policy.memory.setting.park)

    def finish_step(self) -> Logs:
        """What a finished step's line says of the helpers; their counters are from now on those of the run."""
        if self._open is None or self._policy is None:
            return {}
        stats, self.counters = self._counted
        spent = self._open.budget.state()
        self.folder.write_spent(spent)
        pool = self._policy.pool
        return {**stats, "time/dollars": spent["dollars"], **(pool.take_times() if pool is not None else {})}
