"""How the policy learns: the method, what it minimises, the optimizer, and when it is saved."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from upshot.config.bounds import Words
from upshot.config.method import method_of
from upshot.config.other_names import translate_value
from upshot.config.recipe.base import Named, Section

Decay = Annotated[float, Field(ge=0, lt=1)]
"""What stays of a moment after a step."""


class ScheduleConfig(Section):
    """The learning rate over the steps; a name alone will do."""

    short_key: ClassVar[str] = "name"

    name: Literal["constant", "cosine", "linear"] = "constant"
    """After the warm-up: stay, or fall to `lr * min_lr`."""
    warmup_steps: float = Field(0, ge=0)
    """Steps of linear warm-up; below 1 it is a share of all steps."""
    min_lr: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of the peak."""


class OptimizerConfig(Section):
    """What turns gradients into steps; a name alone will do."""

    short_key: ClassVar[str] = "name"

    name: Literal["adamw", "adamw-8bit"] = "adamw"
    """adamw: float32 state. adamw-8bit: its two moments in 8 bits, in blocks with a scale each."""
    weight_decay: float = Field(0.0, ge=0)
    """Share of a weight, times the learning rate, that each step takes off it."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the first and of the second moment, per step."""
    grad_clip: float = Field(1.0, gt=0)
    """Most norm of the gradient."""
    offload: bool = False
    """Keep the optimizer's float32 weights and moments on the host, and update them there."""


class ClipConfig(Section):
    """Bounds of the ratio to the sampling policy; a number alone is both."""

    short_key: ClassVar[str] = "high"

    low: float = Field(0.2, ge=0)
    """The ratio is clipped at 1 - low …"""
    high: float = Field(0.2, ge=0)
    """… and at 1 + high; ppo's values move by so much at most, too."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """One number stands for both bounds."""
        return {"low": value, "high": value} if isinstance(value, int | float) else value


class KLConfig(Section):
    """The KL divergence to the initial model, or with new adapters to the model without them; a number alone is its
    weight."""

    short_key: ClassVar[str] = "weight"

    weight: float = Field(0.0, ge=0)
    """Factor on the divergence; 0: none."""
    where: Literal["loss", "reward"] = "loss"
    """rl: added to the loss, or its sum over a reply taken off the reply's reward. ppo always takes it off each token's
    reward."""
    estimator: Literal["k2", "k3", "k3-corrected"] = "k3"
    """rl, in the loss: k2: half the square of the log ratio. k3: the low-variance one, GRPO's usual choice.
    k3-corrected: times the ratio to the sampling policy, for the divergence's own gradient."""

    @field_validator("estimator", mode="before")
    @classmethod
    def _has_a_gradient(cls, value: Any) -> Any:
        """Refuse k1 with the reason: it would train nothing and look as if it did."""
        if value == "k1":
            raise ValueError(
                "the log ratio k1 has no gradient in a loss (on samples of the policy it is zero in the mean); "
                "take k2 or k3, or train.kl.where=reward, which takes k1 off the reward"
            )
        return value


class ImportanceConfig(Section):
    """Weights on tokens whose probability in the learner is not that of the sampler; a text alone is the rule."""

    short_key: ClassVar[str] = "rule"

    rule: Literal["none", "truncate", "mask"] = "none"
    """none: the sampler's probabilities count as the learner's. truncate: weigh each token by learner / sampler, cut at
    the bounds. mask: the same, but tokens outside the bounds are not trained. With `model.engine: vllm` or
    `model.engine.weights: fp8` truncate where nothing is said."""
    level: Literal["token", "sequence"] = "token"
    """One weight a token, or one a sequence."""
    high: float = Field(2.0, gt=0)
    """Upper bound; of mask at least 1, the weight of a token where learner and sampler agree."""
    low: float = Field(0.0, ge=0)
    """Lower bound; of mask at most 1."""

    @model_validator(mode="after")
    def _in_order(self) -> ImportanceConfig:
        if self.low >= self.high:
            raise ValueError(f"train.importance.low is {self.low:g} and high is {self.high:g}; low must be below high")
        if self.rule == "mask" and not self.low <= 1 <= self.high:
            raise ValueError(
                f"train.importance.low is {self.low:g} and high is {self.high:g}, and the rule 'mask' trains what lies "
                "between them: where learner and sampler agree a token weighs 1, and none would; set low <= 1 <= high"
            )
        return self


class DPOConfig(Section):
    """Learning from pairs: dpo, online-dpo."""

    beta: float = Field(0.1, gt=0)
    """Strength of the reference."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: the log-sigmoid of the margin. ipo: the squared distance of the margin a token from 1 / (2 beta)."""
    min_gap: float = Field(0.0, ge=0)
    """Pairs whose scores differ by less are left out."""


class KTOConfig(Section):
    """Learning from single replies marked good or bad: kto."""

    beta: float = Field(0.1, gt=0)
    """Strength of the reference."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of the loss of good replies. Where good and bad ones are not equally many, set one of the two weights so
    that weight times count is 1 to 1.33 times larger on the good side (the paper's equation 8)."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of the loss of bad replies."""


class PPOConfig(Section):
    """The value head and what its estimates make of the reward: ppo."""

    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Decay of the advantage, per token."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    whiten: bool = True
    """Advantages of a step are shifted and scaled to mean 0 and deviation 1."""
    value_weight: float = Field(0.5, ge=0)
    """Weight of the value loss."""


class SaveConfig(Section):
    """When a checkpoint is written, and which of them stay."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end and when stopped."""
    minutes: float = Field(0.0, ge=0)
    """Minutes after which a finished step is saved whatever `every` says; 0: never."""
    keep: int = Field(2, ge=1)
    """Checkpoints to keep; the newest always stays."""
    best: Words | None = "auto"
    """A metric of the evaluations (`eval.every`), such as 'eval/reward/mean': the checkpoint with its largest value
    stays as well. Of losses the smallest, and after 'min ' or 'max ' what that says. auto: the held-out reward, or the
    loss of sft, dpo and kto, where there are evaluations. None: none is the best."""


class TrainConfig(Section):
    """How the policy learns."""

    method: Words = "rl"
    """rl: policy gradient over groups. sft, dpo, kto: from a data file: dialogues (or the task's own), pairs of
    replies, replies marked good or bad. online-dpo: pairs of replies ranked by reward. ppo: value head and GAE. Or
    'my_pkg.module:Method'."""
    data: str | None = None
    """sft, dpo, kto: parquet or JSONL file of `upshot data prepare` or `upshot logs prepare`; None: the task's own
    dialogues (sft)."""
    steps: int = Field(100, ge=0)
    """Optimizer steps (rl, online-dpo, ppo: one round of rollouts each); 0 beside `epochs`: as many as those make, and
    without: none, so that the run is its warm start."""
    epochs: float | None = Field(None, gt=0, le=1e6)
    """Passes over the rows or examples. If a recipe sets `steps` too, training ends with whichever comes first; on the
    command line or in a call, one of them replaces the other. None: `steps` alone."""
    prompts_per_step: int = Field(16, ge=1)
    """Rows a step; sft, dpo and kto: examples a step."""
    group_size: int = Field(8, ge=1)
    """Replies to each row."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates a step: its replies or examples in this many parts, logged as one. After the first they are
    off-policy (clipped)."""
    token_budget: int = Field(0, ge=0)
    """Most flat tokens of one micro-batch (what replies share counts once); gradients are accumulated over them.
    0 (or auto): as the memory plan finds."""
    async_steps: int = Field(0, ge=0, le=64)
    """rl, online-dpo, ppo: a step's replies are sampled by the weights of this many steps before, while those steps are
    learned; 0: by the newest weights, strictly on-policy."""
    dynamic_sampling: int = Field(0, ge=0)
    """rl: while some groups' rewards are all alike, play other rows in their place, at most this many times a step."""
    advantage: Named = Named(name="grpo")
    """grpo: centred by the group and divided by its standard deviation. dr-grpo: centred. rloo: leave one out.
    separated: every part centred on its own, then added ({non_negative: true}: only the main part can subtract).
    gdpo: every part normalised, added, normalised over the step ({step_norm: sums | none}: only sums of several parts,
    as published with classmates, or nothing over the step). reinforce++: normalised over the step, without groups
    ({baseline: group}: centred by the group before). grpo takes {scale: group | step | none}.
    Or 'my_pkg.module:estimator'."""
    loss: Named = Named(name="clipped")
    """rl, ppo: what is minimised. clipped: the clipped surrogate of PPO and GRPO. gspo: its ratio taken over whole
    sequences. cispo: the ratio is a capped weight. reinforce: no ratio. Or 'my_pkg.module:surrogate'."""
    length_norm: Literal["sequence", "token", "constant"] = "token"
    """sequence: mean over each reply, then over replies. token: mean over all tokens of the step. constant: sum over
    replies x `episode.max_tokens` (Dr.GRPO)."""
    clip: ClipConfig = ClipConfig()
    """rl, ppo: bounds of the ratio to the sampling policy; a number alone is both."""
    kl: KLConfig = KLConfig()
    """rl, ppo: the divergence to the initial model; a number alone is its weight."""
    entropy: float = Field(0.0, ge=0)
    """rl, ppo: weight of the entropy bonus."""
    importance: ImportanceConfig = ImportanceConfig()
    """rl, ppo: importance sampling between sampler and learner; 'truncate' or 'mask' for short."""
    dpo: DPOConfig = DPOConfig()
    """dpo, online-dpo: how pairs are compared."""
    kto: KTOConfig = KTOConfig()
    """kto: how good and bad replies are weighed."""
    ppo: PPOConfig = PPOConfig()
    """ppo: the value head and its advantages."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over the steps; 'cosine' or 'linear' for short."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """What turns gradients into steps; 'adamw-8bit' for short."""
    max_skipped: int = Field(3, ge=1)
    """So many steps in a row without a finite loss and gradient stop the run; none of them changes the weights."""
    save: SaveConfig = SaveConfig()
    """When a checkpoint is written, and which of them stay."""

    @field_validator("method")
    @classmethod
    def _our_word(cls, value: str) -> str:
        if translation := translate_value("train.method", value):
            raise ValueError(f"here it is {translation}")
        return value

    @field_validator("token_budget", mode="before")
    @classmethod
    def _by_plan(cls, value: Any) -> Any:
        return 0 if value == "auto" else value

    @model_validator(mode="after")
    def _ratio_in_minibatches(self) -> TrainConfig:
        """Refuse a loss without a ratio on replies of other weights: its gradient would be another one's."""
        if self.loss.name == "reinforce" and self.minibatches > 1:
            raise ValueError(
                f"train.loss 'reinforce' has no ratio, and of train.minibatches={self.minibatches} all but the first "
                f"are off-policy; take train.loss 'clipped' or 'cispo', or train.minibatches=1"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _epochs_alone(cls, value: Any) -> Any:
        """Where only epochs are given, they alone decide."""
        if isinstance(value, dict) and value.get("epochs") is not None and "steps" not in value:
            return {**value, "steps": 0}
        return value

    @property
    def samples(self) -> bool:
        """Whether the method learns from replies of its own."""
        return method_of(self.method).samples

    @property
    def trains_every_fork(self) -> bool:
        """Along the tree: whether branches are trained that no sibling differs from: by a value head, or to keep them
        near the reference or uncertain, which must not depend on how rewards vary."""
        return method_of(self.method).value_head or bool(self.kl.weight or self.entropy)

    def resolve_steps(self, examples: int) -> TrainConfig:
        """The same with `steps` resolved for this many rows or examples."""
        if self.epochs is None:
            return self
        passes = -(-math.ceil(self.epochs * examples) // self.prompts_per_step)
        return self.model_copy(update={"steps": min(self.steps, passes) if self.steps else passes})
