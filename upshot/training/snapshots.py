"""Earlier states of the policy: copies of it that speak (helpers, steps played ahead), and when a step is played.

A copy is the policy as it was when its training began, or as it was every N steps ago, whoever it speaks as: a user, a
judge, a classmate. What is not trained is shared with the policy, so with adapters a copy costs the adapters only.

The replies of a step are played when they are needed, or some steps ahead while earlier ones are learned. Playing n
steps ahead, step k is sampled entirely by the weights that step k − n began with; the first n steps use the initial
weights. n copies of the trained weights take turns, and a copy is renewed only between two steps that it plays. A step
is played by one state of each helper that is a copy, too. Where that copy is renewed, the steps under way may need two
of its states: then as many copies take turns as there are states in use at once. So what is sampled depends on the
seed, not on timing. A checkpoint that holds the copies is enough for an exact resume: unfinished steps are played
again.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError
from upshot.core.event_loop import Stopwatch
from upshot.core.files import write_folder
from upshot.engine.engine import Engine, Token
from upshot.models.base import Completion, Model, PolicySampler, Request
from upshot.models.engine_model import EngineModel
from upshot.models.rendering import Renderer
from upshot.rollout.reply import Rollout
from upshot.training.learner.snapshot import on_host

PLAYING: ContextVar[int | None] = ContextVar("playing", default=None)
"""The step that is played ahead in these conversations, by a copy of the policy; None: the policy is itself."""
WEIGHTS = "trained.safetensors"
T = TypeVar("T")
Groups = list[list[Rollout]]
TimedGroups = tuple[Groups, dict[str, float]]
"""A step's replies, grouped by row, and how long it took to play them."""


class FrozenPolicy(EngineModel):
    """A copy of the policy that is trained no further."""

    def __init__(self, sampler: EngineModel, module: Any, when: str) -> None:
        self.policy = module
        shared = {id(p): p for p in module.parameters() if not p.requires_grad}
        shared |= {id(b): b for b in module.buffers()}
        self.module = copy.deepcopy(module, dict(shared)).eval().requires_grad_(False)
        engine = Engine(self.module, set(sampler.end_ids), replace(sampler.engine.settings, own_stream=True))
        super().__init__(engine, sampler.tokenizer, f"policy@{when}", sampler.renderer)

    def catch_up(self, step: int) -> None:
        """Take over the policy's weights, which have taken this many steps."""
        trained = dict(self.policy.named_parameters())
        self.load({name: trained[name].detach() for name in self.own}, step)

    @property
    def own(self) -> dict[str, Tensor]:
        """The weights that are not the policy's."""
        shared = {id(p) for p in self.policy.parameters()}
        return {name: p for name, p in self.module.named_parameters() if id(p) not in shared}

    def load(self, weights: Mapping[str, Tensor], version: int = 0) -> None:
        """Take over these weights; `version`: the step that they come from, which its samples name."""
        with torch.no_grad():
            for name, weight in self.own.items():
                weight.copy_(weights[name])
        self.engine.weights_changed()
        self.engine.version = version


class RenewedPolicy(Model):
    """A copy of the policy that is renewed every N steps; several take turns where steps are played ahead."""

    def __init__(self, copies: list[FrozenPolicy], every: int, ahead: int) -> None:
        self.name = f"policy@{every}"
        self.copies, self.every, self.ahead = copies, every, ahead
        self.tokenizer, self.abilities = copies[0].tokenizer, copies[0].abilities
        self.latest = 0
        """How often it has been renewed."""

    @property
    def state_now(self) -> int:
        """How often it had been renewed when the step began that asks now; outside of steps: until now."""
        playing = PLAYING.get()
        return self.latest if playing is None else max(playing - self.ahead, 0) // self.every

    async def generate(self, request: Request) -> list[Completion]:
        """What the copy says, in its state of this step."""
        return await self.copies[self.state_now % len(self.copies)].generate(request)

    def renew(self, step: int) -> None:
        """The policy has taken this many steps: take over its weights when it is time."""
        if step and step % self.every == 0:
            self.latest = step // self.every
            self.copies[self.latest % len(self.copies)].catch_up(step)

    def resume_at(self, step: int) -> None:
        """The next step is this one: say what the copies of a checkpoint are."""
        self.latest = max(step - 1, 0) // self.every
        for state in range(max(self.latest - len(self.copies) + 1, 0), self.latest + 1):
            self.copies[state % len(self.copies)].engine.version = state * self.every

    async def aclose(self) -> None:
        """Release the copies."""
        for one in self.copies:
            await one.aclose()


class PolicyModel(EngineModel, PolicySampler):
    """The model in training, which lends copies of itself."""

    def __init__(self, engine: Engine, tokenizer: Any, renderer: Renderer, module: Any) -> None:
        super().__init__(engine, tokenizer, "policy", renderer)
        self.module = module
        self.copies: dict[str, FrozenPolicy] = {}
        """All that there are, as a checkpoint names them."""
        self.renewed: dict[int, RenewedPolicy] = {}
        """Those that are renewed, by the steps between two renewals."""
        self.ahead: Sequence[FrozenPolicy] = ()
        """Copies that play steps ahead of the learner."""

    async def generate(self, request: Request, on_token: Token | None = None) -> list[Completion]:
        """What the policy says, or the copy that plays this step."""
        playing = PLAYING.get()
        if playing is None:
            return await super().generate(request, on_token)
        return await self.ahead[playing % len(self.ahead)].generate(request, on_token)

    def play_ahead(self, steps: int) -> None:
        """Have copies that play this many steps ahead; called before any other copy is made."""
        self.ahead = [self._copy(f"ahead-{number}") for number in range(steps)]

    def copy_at(self, when: str) -> Model:
        """A copy that is trained no further: 'start', or renewed every N steps."""
        if when == "start":
            return self.copies.get(when) or self._copy(when)
        ModelSpec.parse(f"policy@{when}")  # refuses what is not a number of steps
        every = int(when)
        if every not in self.renewed:
            more = states_at_once(every, len(self.ahead)) - 1
            copies = [self._copy(when), *(self._copy(f"{when}-{number}") for number in range(1, more + 1))]
            self.renewed[every] = RenewedPolicy(copies, every, len(self.ahead))
        return self.renewed[every]

    def weights_changed(self) -> None:
        """The learner has taken a step."""
        self.engine.weights_changed()

    async def rest(self, park: bool) -> None:
        """The learner works: the engine gives its memory back where it is to `park`."""
        if park:
            self.engine.park()

    def renew(self, step: int) -> None:
        """The policy has taken this many steps: copies whose time it is take over its weights."""
        for one in self.renewed.values():
            one.renew(step)

    def resume_at(self, step: int) -> None:
        """The next step is this one; copies have been renewed for those before it."""
        for one in self.renewed.values():
            one.resume_at(step)

    def _copy(self, name: str) -> FrozenPolicy:
        if self.engine.settings.merge == "in place":
            raise UserError(f"'policy@{name}' copies the policy's weights, but the engine merged adapters into them")
        self.copies[name] = FrozenPolicy(self, self.module, name)
        return self.copies[name]

    def snapshot(self) -> Callable[[Path], None]:
        """What writes all copies into a checkpoint, as they are now."""
        kept = {when: on_host(twin.own) for when, twin in self.copies.items()}

        def write(folder: Path) -> None:
            for when, weights in kept.items():
                save_weights(folder / f"policy-{when}", weights)

        return write

    def load_copies(self, folder: Path) -> None:
        """The copies that a checkpoint kept."""
        for when, twin in self.copies.items():
            twin.load(load_weights(folder / f"policy-{when}"))


def states_at_once(every: int, ahead: int) -> int:
    """How many states of a copy that is renewed after `every` steps are in use at once, `ahead` steps being played.

    Step s is played by the state of step s - ahead. When step k is about to be learned, those up to k have been played;
    with c copies the state that is written over is older than c x every steps, so (c - 1) x every >= ahead - 1 will do.
    """
    return 1 + -(-(ahead - 1) // every) if ahead else 1


def save_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Weights by name, entirely or not at all: of a copy, or of the reference that a phase began with."""
    from safetensors.torch import save_file

    write_folder(folder, lambda to: save_file({name: w.contiguous() for name, w in weights.items()}, to / WEIGHTS))


def load_weights(folder: Path) -> dict[str, Tensor]:
    """What `save_weights` wrote."""
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).is_file():
        raise UserError(f"'{folder / WEIGHTS}' is missing, so the run's reference model cannot be restored")
    return load_file(folder / WEIGHTS)


@dataclass
class RolloutSchedule:
    """Plays the steps of a phase."""

    play: Callable[[int], Coroutine[Any, Any, Groups]]
    sampler: PolicySampler
    ahead: int
    """How many steps ahead of the learner replies are played; 0: each step is played when it is needed."""
    steps: range
    _under_way: dict[int, asyncio.Task[TimedGroups]] = field(default_factory=dict)

    async def __aenter__(self) -> RolloutSchedule:
        self.sampler.resume_at(self.steps.start)
        for step in range(self.steps.start, self.steps.start + self.ahead):
            # At the start all copies hold the initial weights; after a resume, those that the checkpoint kept.
            self.sampler.ahead[step % self.ahead].engine.version = max(step - self.ahead, 0)
            self._begin(step)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    async def get(self, step: int) -> TimedGroups:
        """The replies of a step."""
        if self.ahead:
            return await self._under_way.pop(step)
        self.sampler.renew(step)
        return await self._play(step)

    def start_next(self, step: int) -> None:
        """Before step `step` is learned: start playing a later step with the weights as they are now."""
        self.sampler.renew(step)
        # This copy has just played `step` and plays next what comes `ahead` steps later: it is free until then, so its
        # weights can be replaced while the other copies are still sampling.
        self.sampler.ahead[step % self.ahead].catch_up(step)
        self._begin(step + self.ahead)

    async def _play(self, step: int) -> TimedGroups:
        """Play a step, and measure where the time went."""
        started = time.perf_counter()
        with Stopwatch().running() as watch:
            groups = await self.play(step)
        took = time.perf_counter() - started
        times = {f"time/{name}": watch.seconds[name] for name in ("sample", "futures", "judges") if watch.seconds[name]}
        tokens = 0
        for reply in chain.from_iterable(groups):
            tokens += sum([len(sample.ids) for sample in reply.samples()])
            for future in reply.futures:
                tokens += sum([len(sample.ids) for _, sample in future.conversation.places(future.shared)])
        return groups, times | {"time/rollout": took, "time/sampled_per_s": tokens / max(took, 1e-9)}

    def _begin(self, step: int) -> None:
        if step in self.steps:
            # Whoever samples in this task, however deep below it, finds the step and by it the copy that plays it.
            context = contextvars.copy_context()
            context.run(PLAYING.set, step)
            self._under_way[step] = asyncio.get_running_loop().create_task(self._play(step), context=context)


def staleness(groups: Sequence[Sequence[Rollout]], step: int) -> dict[str, float]:
    """How many steps old the weights were that sampled a step's tokens: mean and maximum."""
    samples = [sample for group in groups for reply in group for sample in reply.samples() if sample.ids]
    tokens = sum(len(sample.ids) for sample in samples)
    if not tokens:
        return {}
    behind = sum((step - sample.version) * len(sample.ids) for sample in samples)
    most = max(step - sample.version for sample in samples)
    return {"policy/staleness": behind / tokens, "policy/staleness_max": float(most)}


async def in_thread(work: Callable[[], T]) -> T:
    """Run work in a thread and return its result. A cancellation is delivered only after the work has ended.

    A thread cannot be stopped. If the cancellation arrived at once, the run would save weights while they change.
    """
    task = asyncio.current_task()
    assert task is not None
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1

    def on_device() -> T:
        torch.cuda.set_device(device)  # each thread has its own; of -1 nothing comes
        return work()

    future = asyncio.get_running_loop().run_in_executor(None, on_device)
    cancelled = 0
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled += 1
            task.uncancel()
    if cancelled:
        task.cancel()
    return future.result()
