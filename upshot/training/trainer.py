"""The loop in pieces: sample → score → forward_backward → step, on one set of weights.

    trainer = upshot.Trainer.load("smollm2-135m", max_tokens=64, lr=1e-5)
    groups = await trainer.sample(rows, group_size=8)          # replies, not yet worth anything
    await trainer.score(groups, upshot.talk({polite: 1.0}))    # … or set reply.reward and reply.credit yourself
    logs = trainer.forward_backward(groups) | trainer.step()

`trainer.learn(groups)` is a whole round: what `upshot.train` does with a step's replies, with `train.minibatches`
optimizer steps. That runs the same pieces from a recipe, with a run folder, checkpoints and resume around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from upshot.config.bounds import Count, NonNegative, Whole
from upshot.config.method import method_of
from upshot.config.recipe import Section, TinyConfig, TrainConfig
from upshot.config.sampling import Sampling
from upshot.config.validation import check_value, explain_error
from upshot.core.conversation import Conversation, Message, Row, Tools, derive_seed
from upshot.core.errors import UserError
from upshot.core.event_loop import gather
from upshot.core.files import open_to_readers
from upshot.engine.engine import Engine, EngineSettings
from upshot.models.rendering import Renderer
from upshot.rewards.build import Metrics, metric_configs, named_metrics
from upshot.rewards.credit import Reward
from upshot.rollout.blame import blame
from upshot.rollout.episode import Policy, catch_failure, play_episode
from upshot.rollout.futures.talk import Futures, Talk
from upshot.rollout.play import RolloutContext, score_reply
from upshot.rollout.reply import Rollout
from upshot.rollout.services import assemble
from upshot.tasks.base import Task
from upshot.tasks.participants.base import Participant
from upshot.training.learner.learner import SEQUENCES, TOKENS, Learner
from upshot.training.loops import rl
from upshot.training.loops.phase import Lesson, learn
from upshot.training.loops.sft import Dialogues, Sft
from upshot.training.objectives.objectives import MEAN
from upshot.training.snapshots import PolicyModel

S = TypeVar("S", bound=Section)
Groups = Sequence[Sequence[Rollout]]
OF_RUNS = {
    "data": "imitate(dialogues) learns from them", "epochs": "go over your rows as often as you like",
    "prompts_per_step": "pass that many rows to sample()", "group_size": "set it with sample(rows, group_size=…)",
    "async_steps": "", "dynamic_sampling": "", "max_skipped": "train/skipped shows it", "save": "save(folder) saves",
}  # fmt: skip
"""Keys of `train` that only a whole run has a use for, and what to do instead."""


class Trainer:
    """A model in training, with the four verbs of the loop."""

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        system: str = "",
        max_context: int = 0,
        tools: Tools = (),
        **train: Any,
    ) -> None:
        """Make it from a transformers model and its tokenizer.

        max_tokens, temperature: length limit and sampling temperature of each of its turns.
        system: its system prompt.
        max_context: maximum number of tokens in prompt and reply together; 0: what the model's configuration says.
        train: keys of a recipe's section `train` (method, lr, kl, importance, minibatches …), except those that make
            sense only in a whole run. With a KL penalty and with `method="online-dpo"`, the current weights are kept as
            the reference.
        """
        check_value("max_tokens", max_tokens, Count)
        check_value("temperature", temperature, NonNegative)
        check_value("max_context", max_context, Whole)
        limit = max_context or int(getattr(module.config.get_text_config(), "max_position_embeddings", 0) or 0)
        for key in train.keys() & OF_RUNS.keys():
            raise UserError(f"Trainer does not take '{key}', an option of upshot.train; {OF_RUNS[key]}".rstrip("; "))
        self.config = _read_section(TrainConfig, train)
        method = method_of(self.config.method)
        if not method.samples and method.needs_reference(self.config):
            raise UserError(
                f"Trainer has no method '{self.config.method}', which reads pairs from a file; use upshot.train"
            )
        self.renderer = Renderer(tokenizer)
        self.engine = Engine(module, self.renderer.end_ids, EngineSettings())
        self.model = PolicyModel(self.engine, tokenizer, self.renderer, module)
        """As a model that others can ask; `model.copy_at('start')` is a copy that is trained no further."""
        self.policy = Policy(self.model, self.renderer, Sampling(max_tokens, temperature), limit, system, tools)
        """As a speaker: `await trainer.policy.reply(conversation)` says its next turn."""
        changed = self.engine.weights_changed
        self.learner = Learner(module, tokenizer, self.config, max_tokens, temperature, changed, method.value_head)
        if method.needs_reference(self.config):
            self.learner.keep_reference()
        self.limit = limit
        self._estimated: list[Sequence[float | None]] = []
        """The advantages that were estimated here, and are estimated again when their replies are learned again."""

    @classmethod
    def load(cls, path: str, device: str = "auto", dtype: str = "auto", **options: Any) -> Trainer:
        """The model of a folder, a Hub name or `smollm2-135m`; options as in the constructor."""
        from upshot.models.local import load_whole

        return cls(*load_whole(path, dtype, device), **options)

    @classmethod
    def tiny(
        cls, words: Sequence[str], seed: int = 0, shape: Mapping[str, int] | None = None, **options: Any
    ) -> Trainer:
        """A new small model that knows only these words, for a task with its own language; it learns in minutes."""
        from upshot.models.tiny import tiny_model, tiny_tokenizer

        tokenizer = tiny_tokenizer(sorted(set(words)))
        return cls(tiny_model(_read_section(TinyConfig, shape or {}), tokenizer, seed), tokenizer, **options)

    async def sample(
        self,
        rows: Sequence[Row],
        group_size: int = 8,
        seed: int = 0,
        environment: Participant | None = None,
        max_turns: int = 1,
    ) -> list[list[Rollout]]:
        """`group_size` episodes of each row, all at once: one reply, or up to `max_turns` with an environment."""

        async def one(row: Row, group: int, index: int) -> Rollout:
            conversation = Conversation(row, derive_seed(seed, row.id, group, index), f"{row.id}#{group}.{index}")
            reply = Rollout(conversation, group)
            episode = play_episode(conversation, self.policy, environment, max_turns)
            if (failure := await catch_failure(episode, "episode")) is not None:
                reply.reward = Reward(failure)
            return reply

        groups = [gather(one(row, group, index) for index in range(group_size)) for group, row in enumerate(rows)]
        return await gather(groups)

    async def score(self, groups: Groups, futures: Futures) -> list[list[float | None]]:
        """Continue all replies, score the results, and credit the tokens; returns the rewards, None where missing."""
        context = RolloutContext(self.policy, futures)
        await gather(score_reply(context, r) for group in groups for r in group if r.conversation.mask)
        blame(groups, futures)
        return [[reply.reward.total.value for reply in group] for group in groups]

    def forward_backward(self, groups: Groups) -> dict[str, float]:
        """Accumulate the gradient of `train.method` over replies that have credit; returns what to log.

        Advantages are those you set (`reply.advantages`, one a span), else those of `train.advantage`; those of ppo are
        its value head's.
        """
        lesson = self._prepare(groups)
        return lesson.logs | self._add_gradient(lesson)

    def learn(self, groups: Groups, seed: int = 0) -> dict[str, float]:
        """One step as in a run: `train.minibatches` optimizer steps on replies that have credit; returns what to log.

        `seed`: for the order of the minibatches.
        """
        return learn(self.learner, groups, seed, lambda _, groups: self._prepare(groups))

    def imitate(self, dialogues: Sequence[Sequence[Message]]) -> dict[str, float]:
        """Accumulate the gradient of supervised learning on every assistant turn; returns what to log."""
        data = Dialogues(dialogues, self.renderer, self.limit)
        return self._add_gradient(Lesson([[data[index]] for index in range(len(data))], Sft))

    def _prepare(self, groups: Groups) -> Lesson:
        """What the method learns from replies."""
        method = method_of(self.config.method)
        if not method.samples:
            raise UserError(f"train.method is '{self.config.method}', which learns from dialogues: use imitate()")
        if not method.credits_tokens:
            lesson: Lesson = method.prepare(self.config)(self.learner, groups)
            return lesson
        credited = [reply for group in groups for reply in group if reply.credit is not None]
        ours = {id(advantages) for advantages in self._estimated}
        set_by_user = [reply for reply in credited if reply.advantages and id(reply.advantages) not in ours]
        if set_by_user and len(set_by_user) < len(credited):
            raise UserError(
                "some replies have advantages of your own and others have none; give one to every reply that has credit"
            )
        lesson = rl.prepare(self.learner, groups, estimate=not set_by_user)
        self._estimated = [] if set_by_user else [reply.advantages for reply in credited]
        return lesson

    def _add_gradient(self, lesson: Lesson) -> dict[str, float]:
        if self.config.minibatches > 1:
            raise UserError(
                f"train.minibatches is {self.config.minibatches}, but this adds to a single gradient; learn(groups) "
                "takes that many optimizer steps"
            )
        objective = lesson.objective()
        logs = self.learner.forward_backward(lesson.units, objective) if lesson.units else {SEQUENCES: 0.0, TOKENS: 0.0}
        return logs if MEAN in lesson.logs else logs | objective.drift(self.learner.ranks)

    def step(self) -> dict[str, float]:
        """One optimizer step with the gradient so far; later samples come from the new weights. Returns what to log."""
        return self.learner.step()

    def save(self, folder: str | Path) -> None:
        """Weights and tokenizer as a Hugging Face folder."""
        self.learner.save(Path(folder))
        open_to_readers(Path(folder))

    async def aclose(self) -> None:
        """Release the engine's memory."""
        await self.model.aclose()


def _read_section(kind: type[S], keys: Mapping[str, Any]) -> S:
    """A section of a recipe from keyword arguments."""
    try:
        return kind.model_validate(dict(keys))
    except ValidationError as error:
        raise UserError(f"Trainer: {explain_error(error, kind)}") from None


def talk(
    metrics: Metrics,
    user: Participant | None = None,
    samples: int = 1,
    rounds: int = 0,
    task: Task | None = None,
    judge: Any = None,
) -> Talk:
    """Futures in which user and policy continue for `rounds` rounds, scored by weighted metrics.

    metrics: name or function → weight. Without a user, or with rounds 0, the reply is scored as it stands.
    """
    models = {"judge": judge} if judge is not None else {}
    services = assemble(task, models, metric_configs(named_metrics(metrics)), user=user)
    return Talk(services.metrics, services.weights, services.user, samples, rounds)
