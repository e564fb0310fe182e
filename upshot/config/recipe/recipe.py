"""The whole recipe, and its small sections: warm start, evaluation, budget."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from upshot.config.bounds import FolderName
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe.base import Named, Section
from upshot.config.recipe.episode import CreditConfig, EpisodeConfig, FuturesConfig
from upshot.config.recipe.model import PolicyConfig
from upshot.config.recipe.reward import RewardConfig
from upshot.config.recipe.train import TrainConfig

OWN_CODE = re.compile(r"(scripted:)?[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""A value that names the user's own code."""


class WarmStartConfig(Section):
    """Supervised training on the task's dialogues before reinforcement learning starts."""

    steps: int = Field(100, ge=1)
    """Optimizer steps."""
    batch: int = Field(64, ge=1)
    """Dialogues per step."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate; it decays to zero along a cosine."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up."""
    new_model_only: bool = False
    """Skip the warm start when `model.path` names a trained model."""


class EvalConfig(Section):
    """Evaluation on held-out rows during training."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; the first one comes before any step. 0: no evaluation."""
    split: str = "validation"
    """The task's held-out split."""
    data: str | None = None
    """sft, dpo, kto: file of held-out examples; None: the dialogues of the split (sft)."""
    rows: int = Field(64, ge=1)
    """Number of held-out rows or examples to use."""
    samples: int = Field(1, ge=1)
    """Replies to each row; with several replies and a temperature above 0, pass@k is reported."""
    stop_after: int = Field(0, ge=0)
    """Stop training after this many consecutive evaluations without a new best value of `train.save.best` (None: of the
    reward, or for sft, dpo and kto of the loss); 0: never."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the policy in evaluations."""
    judge: str | None = None
    """A model among `models` that judges held-out replies instead of `judge`, so that the reported scores do not come
    from the judge used in training; None: the same judge. A metric that sets its own `judge` keeps it."""
    monitor: str | None = None
    """A model among `models` that reads only question and thought and predicts the verifier's score; None: no
    monitor."""


class BudgetConfig(Section):
    """What the helper models may cost. When the budget is exhausted, the run stops cleanly and can be resumed."""

    max_calls: int | None = Field(None, ge=0)
    """Maximum number of calls to endpoints and providers."""
    max_tokens: int | None = Field(None, ge=0)
    """Maximum number of their prompt and completion tokens."""
    max_dollars: float | None = Field(None, ge=0)
    """Maximum cost in US dollars."""


class Recipe(Section):
    """One training setting: a task, an episode, futures, a reward and a learner."""

    name: FolderName = "run"
    """Names the run folder."""
    seed: int = Field(0, ge=0, lt=2**63)
    """The same seed gives the same run: on the CPU, with the same number of threads and the same kind of processor."""
    run_dir: str = ""
    """The run folder; empty: runs/NAME-DATE."""
    code: list[str] = Field(default_factory=list)
    """Folders searched for your own code ('my_pkg.module:Thing'), after the current folder and Python's path; relative
    to the recipe. Not set: the recipe's own folder."""
    model: PolicyConfig = PolicyConfig()
    """The policy."""
    models: dict[str, ModelSpec] = Field(default_factory=dict)
    """Helper models by name (user, judge …): a URL, provider/model, a folder, 'policy', 'serve:NAME' or
    'scripted:…'."""
    serve: str | None = None
    """A serve file (`upshot serve FILE.yaml`), relative to the recipe: its servers run as long as the training does,
    and 'serve:NAME' under `models` names one of them; None: no servers."""
    sandbox: str = "local"
    """Where untrusted programs run: 'local', or the URL of a sandbox server."""
    verdict: Literal["profile", "believe", "strict"] = "profile"
    """How a program's tests become a verdict (docs/why/verdict.md). profile: the judge must confirm every check
    that it can decide; the plain run decides the others. believe: the plain run decides every check. strict: checks
    that the judge cannot decide do not count, and rows with only such checks are left out."""
    call_seconds: float = Field(120.0, gt=0)
    """Time limit in seconds for one call to your own metric, verifier, user or environment; if it is exceeded, the
    score is missing (timeout). Time spent in helper models, sandbox and worker processes does not count: they have
    their own limits."""
    task: Named
    """The task; all keys beside `name` are the task's options."""
    episode: EpisodeConfig = EpisodeConfig()
    """How the trained part of a conversation proceeds."""
    futures: FuturesConfig = FuturesConfig()
    """How a reply is continued before it is scored."""
    reward: RewardConfig = RewardConfig()
    """How a conversation is scored."""
    credit: CreditConfig = CreditConfig()
    """Which tokens get the credit."""
    warm_start: WarmStartConfig | None = None
    """Supervised steps before the first rollout; None: no warm start."""
    train: TrainConfig = TrainConfig()
    """How the policy learns."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out rows during training."""
    budget: BudgetConfig = BudgetConfig()
    """Limits for the helper models."""
    trackers: list[str] = Field(default_factory=list)
    """Where to log besides file and console: tensorboard, wandb, trackio."""
    keep_rollouts: int = Field(64, ge=0)
    """Replies per step written to rollouts.jsonl; 0: all."""

    @property
    def needed_models(self) -> dict[str, ModelSpec]:
        """Helper models that the recipe uses: a variant without futures need not load its classmates.

        Models named user or judge count as used, since these names are defaults. If the recipe runs the user's own
        code, all models do: the code may ask for any of them.
        """
        asked = self.model_dump(mode="json", exclude={"models", "model", "name", "run_dir", "serve", "sandbox", "code"})
        words = {"user", "judge", *_texts(asked)}
        if any(OWN_CODE.fullmatch(word) for word in words):
            return dict(self.models)
        return {name: spec for name, spec in self.models.items() if name in words}

    @model_validator(mode="after")
    def _weigh_another_engine(self) -> Recipe:
        """vLLM's log-probabilities, and those computed in 8 bits, differ from the learner's: unless the recipe sets
        `train.importance`, tokens are weighted for the difference."""
        train = self.train
        if self.model.engine.rounds_otherwise and "rule" not in train.importance.model_fields_set:
            importance = train.importance.model_copy(update={"rule": "truncate"})
            self.train = train.model_copy(update={"importance": importance})
        return self

    @model_validator(mode="after")
    def _stay_on_policy(self) -> Recipe:
        """Refuse a loss without a ratio for replies that were sampled some steps ago."""
        train = self.train
        if train.loss.name == "reinforce" and train.async_steps and train.importance.rule == "none":
            raise ValueError(
                f"train.loss 'reinforce' has no ratio, and with train.async_steps={train.async_steps} every reply is "
                "off-policy; use train.loss 'clipped' or 'cispo', or train.importance=truncate, or train.async_steps=0"
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
