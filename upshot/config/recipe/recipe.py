"""The whole recipe, and its small sections: warm start, evaluation, budget."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from upshot.config.bounds import FolderName
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe.base import Named, Section
from upshot.config.recipe.policy import PolicyConfig
from upshot.config.recipe.reward import RewardConfig
from upshot.config.recipe.rollout import CreditConfig, EpisodeConfig, FuturesConfig
from upshot.config.recipe.train import TrainConfig

OWN_CODE = re.compile(r"(scripted:)?[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""What names a thing of the user's own."""


class WarmStartConfig(Section):
    """Supervised training on the task's dialogues before the reinforcement."""

    steps: int = Field(100, ge=1)
    """Optimizer steps."""
    batch: int = Field(64, ge=1)
    """Dialogues a step."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate, with a cosine to zero."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up."""
    new_model_only: bool = False
    """Leave it out when `model.path` names a trained model."""


class EvalConfig(Section):
    """Playing held-out rows while training."""

    every: int = Field(0, ge=0)
    """Steps between evaluations, the first one before any step; 0: none."""
    split: str = "validation"
    """The task's split that is held out."""
    data: str | None = None
    """sft, dpo, kto: file of held-out examples; None: the dialogues of the split (sft)."""
    rows: int = Field(64, ge=1)
    """Rows or examples of it."""
    samples: int = Field(1, ge=1)
    """Replies to each row; with several, at a temperature above 0, there is pass@k."""
    stop_after: int = Field(0, ge=0)
    """Evaluations in a row without a new best of `train.save.best` (None: of the reward, or of the loss of sft and dpo)
    that end the training; 0: never."""
    temperature: float = Field(0.0, ge=0)
    """Of the policy in evaluation."""
    judge: str | None = None
    """A helper model among `models` that judges held-out replies in place of `judge`, so that what is reported is not
    by the judge that was learned from; None: the same judge. A metric with a `judge` of its own keeps it."""
    monitor: str | None = None
    """A helper model among `models` that reads question and thought only and predicts the verifier's score; None: no
    monitor."""


class BudgetConfig(Section):
    """What the helper models may cost; the run stops cleanly, and can be resumed, when it is used up."""

    max_calls: int | None = Field(None, ge=0)
    """Calls of endpoints and providers."""
    max_tokens: int | None = Field(None, ge=0)
    """Their prompt and completion tokens."""
    max_dollars: float | None = Field(None, ge=0)
    """Their cost."""


class Recipe(Section):
    """One training setting: a task, an episode, futures, a reward and a learner."""

    name: FolderName = "run"
    """Names the run folder."""
    seed: int = Field(0, ge=0, lt=2**63)
    """One seed, one run: on the CPU, with as many threads on the same kind of processor."""
    run_dir: str = ""
    """The run folder; empty: runs/NAME-DATE."""
    code: list[str] = Field(default_factory=list)
    """Folders in which your own code ('my_pkg.module:Thing') is found, besides the current one and where Python looks;
    relative to the recipe. Not given: the recipe's own folder."""
    model: PolicyConfig = PolicyConfig()
    """The policy."""
    models: dict[str, ModelSpec] = Field(default_factory=dict)
    """Helper models by name (user, judge …): a URL, provider/model, a folder, 'policy', 'serve:NAME', 'scripted:…'."""
    serve: str | None = None
    """A serve file (`upshot serve FILE.yaml`), relative to the recipe: its servers are up while the run lasts, and
    'serve:NAME' among `models` is one of them; None: no servers."""
    sandbox: str = "local"
    """Where untrusted programs run: 'local', or the URL of a sandbox server."""
    verdict: Literal["profile", "believe", "strict"] = "profile"
    """How a program's tests become a verdict (docs/why/verdict.md). profile: a check that the judge can decide must be
    confirmed, any other goes by the plain look. believe: every check goes by the plain look. strict: checks that the
    judge cannot decide do not count, and rows that have no others are left out."""
    call_seconds: float = Field(120.0, gt=0)
    """Most seconds of one call of your own metric, verifier, user or environment; then its score is missing: timeout.
    Not counted: what helper models, sandbox and worker processes take, which have limits of their own."""
    task: Named
    """The task; its other keys are its own options."""
    episode: EpisodeConfig = EpisodeConfig()
    """How the trained part unfolds."""
    futures: FuturesConfig = FuturesConfig()
    """How it is continued."""
    reward: RewardConfig = RewardConfig()
    """What it is worth."""
    credit: CreditConfig = CreditConfig()
    """Which tokens earned it."""
    warm_start: WarmStartConfig | None = None
    """Supervised steps before the first rollout; None: none."""
    train: TrainConfig = TrainConfig()
    """How the policy learns."""
    eval: EvalConfig = EvalConfig()
    """Held-out rows while training."""
    budget: BudgetConfig = BudgetConfig()
    """Limits for the helper models."""
    trackers: list[str] = Field(default_factory=list)
    """Besides file and console: tensorboard, wandb, trackio."""
    keep_rollouts: int = Field(64, ge=0)
    """Replies a step that go to rollouts.jsonl; 0 keeps all."""

    @property
    def needed_models(self) -> dict[str, ModelSpec]:
        """Helper models that something of the recipe asks: a twin without futures need not load their classmates.

        Those with a name that is a default (user, judge) are taken for asked, and all are where code of the user's own
        may ask for any of them.
        """
        asked = self.model_dump(mode="json", exclude={"models", "model", "name", "run_dir", "serve", "sandbox", "code"})
        words = {"user", "judge", *_texts(asked)}
        if any(OWN_CODE.fullmatch(word) for word in words):
            return dict(self.models)
        return {name: spec for name, spec in self.models.items() if name in words}

    @model_validator(mode="after")
    def _weigh_another_engine(self) -> Recipe:
        """Log-probabilities of vLLM, or in 8 bits, are not quite the learner's: unless the recipe says otherwise, they
        are weighed."""
        train = self.train
        if self.model.engine.rounds_otherwise and "rule" not in train.importance.model_fields_set:
            importance = train.importance.model_copy(update={"rule": "truncate"})
            self.train = train.model_copy(update={"importance": importance})
        return self

    @model_validator(mode="after")
    def _stay_on_policy(self) -> Recipe:
        """Refuse a loss without a ratio on replies that were sampled steps ago."""
        train = self.train
        if train.loss.name == "reinforce" and train.async_steps and train.importance.rule == "none":
            raise ValueError(
                f"train.loss 'reinforce' has no ratio, and with train.async_steps={train.async_steps} every reply is "
                "off-policy; take train.loss 'clipped' or 'cispo', or train.importance=truncate, or train.async_steps=0"
            )
        return self


def _texts(value: Any) -> Iterator[str]:
    """All texts in plain data: values, and the keys of what recipes map."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (str(key), *_texts(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
