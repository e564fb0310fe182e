"""How the policy learns: the method, what it minimises, the optimizer, and when it is saved."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from upshot.config.bounds import Words
from upshot.config.method import method_of, methods
from upshot.config.other_names import translate_value
from upshot.config.recipe.base import Named, Section

Decay = Annotated[float, Field(ge=0, lt=1)]
"""The share of a moment that is kept after a step."""


class ScheduleConfig(Section):
    """The learning-rate schedule; a plain string is short for `name`."""

    short_key: ClassVar[str] = "name"

    name: Literal["constant", "cosine", "linear"] = "constant"
    """After the warm-up: constant, or decay to `lr * min_lr` along a cosine or a line."""
    warmup_steps: float = Field(0, ge=0)
    """Updates of linear warm-up (`minibatches` in each step); a value below 1 is a share of all of them."""
    min_lr: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of the peak."""


class OptimizerConfig(Section):
    """The optimizer; a plain string is short for `name`."""

    short_key: ClassVar[str] = "name"

    name: Literal["adamw", "adamw-8bit"] = "adamw"
    """adamw: float32 state. adamw-8bit: both moments in 8 bits, in blocks with one scale each."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay: each step subtracts lr * weight_decay times the weight."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the first and of the second moment, per step."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""
    offload: bool = False
    """Keep the optimizer's float32 weights and moments in host memory and update them there."""


class ClipConfig(Section):
    """Bounds of the ratio to the sampling policy; a single number sets both."""

    short_key: ClassVar[str] = "high"

    low: float = Field(0.2, ge=0)
    """Lower bound: the ratio is clipped at 1 - low."""
    high: float = Field(0.2, ge=0)
    """Upper bound: the ratio is clipped at 1 + high. ppo also limits the change of its value estimates to this."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """One number stands for both bounds."""
        return {"low": value, "high": value} if isinstance(value, int | float) else value


class KLConfig(Section):
    """The KL divergence to the initial model; with new adapters, to the model without them. A single number is short
    for `weight`."""

    short_key: ClassVar[str] = "weight"

    weight: float = Field(0.0, ge=0)
    """Factor on the divergence; 0: no penalty."""
    where: Literal["loss", "reward"] = "loss"
    """rl: add it to the loss, or subtract its sum over a reply from the reply's reward. ppo always subtracts it from
    each token's reward."""
    estimator: Literal["k2", "k3", "k3-corrected"] = "k3"
    """rl, in the loss. k2: half the squared log ratio. k3: the low-variance estimator that GRPO usually uses.
    k3-corrected: k3 times the ratio to the sampling policy, which gives the gradient of the divergence itself."""

    @field_validator("estimator", mode="before")
    @classmethod
    def _has_a_gradient(cls, value: Any) -> Any:
        """Refuse k1 with the reason: it would look like a penalty and have no effect."""
        if value == "k1":
            raise ValueError(
                "the log ratio k1 has no gradient in a loss (its expectation over the policy's samples is zero); "
                "use k2 or k3, or train.kl.where=reward, which subtracts k1 from the reward"
            )
        return value


class ImportanceConfig(Section):
    """Importance weights for tokens whose probability differs between learner and sampler; a plain string is short for
    `rule`."""

    short_key: ClassVar[str] = "rule"

    rule: Literal["none", "truncate", "mask"] = "none"
    """none: treat the sampler's probabilities as the learner's. truncate: weight each token by learner / sampler,
    clipped to the bounds. mask: the same, but tokens outside the bounds are not trained. If the rule is not set,
    it is truncate with `model.engine: vllm` and with fp8 weights or keys and values, else none."""
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or one per sequence."""
    high: float = Field(2.0, gt=0)
    """Upper bound; with the rule mask, at least 1, the weight of a token on which learner and sampler agree."""
    low: float = Field(0.0, ge=0)
    """Lower bound; with the rule mask, at most 1."""

    @model_validator(mode="after")
    def _in_order(self) -> ImportanceConfig:
        if self.low >= self.high:
            raise ValueError(f"train.importance.low is {self.low:g} and high is {self.high:g}; low must be below high")
        if self.rule == "mask" and not self.low <= 1 <= self.high:
            raise ValueError(
                f"train.importance.low is {self.low:g} and high is {self.high:g}, but the rule 'mask' trains only "
                "tokens whose weight is between them, and a token on which learner and sampler agree has weight 1; "
                "set low <= 1 <= high"
            )
        return self


class DPOConfig(Section):
    """Learning from pairs: dpo, online-dpo."""

    beta: float = Field(0.1, gt=0)
    """How strongly the policy is kept close to the reference model."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: the log-sigmoid of the margin. ipo: the squared distance between the margin per token and 1 / (2
    beta)."""
    min_gap: float = Field(0.0, ge=0)
    """Leave out pairs whose scores differ by less than this."""


class KTOConfig(Section):
    """Learning from single replies marked good or bad: kto."""

    beta: float = Field(0.1, gt=0)
    """How strongly the policy is kept close to the reference model."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of the loss on good replies. If good and bad replies are not equally frequent, choose the two weights so
    that weight times count is 1 to 1.33 times larger on the good side (equation 8 of the paper)."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of the loss on bad replies."""


class PPOConfig(Section):
    """The value head and the advantages computed with it: ppo."""

    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE's lambda: decay per token."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    whiten: bool = True
    """Normalise a step's advantages to mean 0 and standard deviation 1."""
    value_weight: float = Field(0.5, ge=0)
    """Weight of the value loss."""


class SaveConfig(Section):
    """When checkpoints are written and which are kept."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end and when the run is stopped."""
    minutes: float = Field(0.0, ge=0)
    """Also save when a step finishes and this many minutes have passed since the last save; 0: never."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep; the newest is always kept."""
    best: Words | None = "auto"
    """Also keep the checkpoint with the best value of this evaluation metric (`eval.every`), such as
    'eval/reward/mean'. Best means largest, and for losses smallest; put 'min ' or 'max ' before the name to choose.
    auto: the held-out reward, or the loss for sft, dpo and kto, if there are evaluations. None: keep no best
    checkpoint."""


def _list_methods(schema: dict[str, Any]) -> None:
    """Tell editors the names of the methods, and that code of the user's own has a path."""
    schema["anyOf"] = [{"enum": methods.names()}, {"pattern": "^[^:]+:[^:]+$"}]


class TrainConfig(Section):
    """How the policy learns."""

    method: Words = Field("rl", json_schema_extra=_list_methods)
    """rl: policy gradient over groups. sft: imitate the dialogues of a data file or of the task. dpo: learn from pairs
    of replies in a data file. kto: learn from replies in a data file that are marked good or bad. online-dpo: learn
    from pairs of sampled replies, ranked by reward. ppo: policy gradient with a value head and GAE. Or
    'my_pkg.module:Method'."""
    data: str | None = None
    """sft, dpo, kto: a parquet or JSONL file made by `upshot data prepare` or `upshot logs prepare`; None: the task's
    own dialogues (sft only)."""
    steps: int = Field(100, ge=0)
    """Optimizer steps; for rl, online-dpo and ppo each step is one round of rollouts. 0 together with `epochs`: as many
    steps as the epochs take. 0 without `epochs`: none, so the run is only its warm start."""
    epochs: float | None = Field(None, gt=0, le=1e6)
    """Passes over the rows or examples, rounded up to whole steps. If a recipe also sets `steps`, training ends with
    whichever comes first; on the command line or in a call, setting one replaces the other. None: only `steps`
    counts."""
    prompts_per_step: int = Field(16, ge=1)
    """Rows per step; sft, dpo and kto: examples per step."""
    group_size: int = Field(8, ge=1)
    """Replies to each row."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates per step: the step's replies or examples are split into this many parts, logged as one step.
    All updates after the first are off-policy (clipped)."""
    token_budget: int = Field(0, ge=0)
    """Maximum number of tokens in one micro-batch (prefixes that replies share count once); gradients are accumulated
    over micro-batches. 0 (or auto): chosen by the memory plan."""
    async_steps: int = Field(0, ge=0, le=64)
    """rl, online-dpo, ppo: sample a step's replies with the weights from this many steps earlier, while those steps are
    still being learned; 0: with the newest weights, strictly on-policy."""
    dynamic_sampling: int = Field(0, ge=0)
    """rl, online-dpo, ppo: replace groups whose rewards are all equal by groups of other rows, at most this many times
    per step."""
    advantage: Named = Named(name="grpo")
    """grpo: centred by the group's mean and divided by its standard deviation. dr-grpo: only centred. rloo: leave one
    out. separated: each part centred on its own, then summed ({non_negative: true}: only the main part can be
    negative). gdpo: each part normalised, summed, then normalised over the step ({step_norm: sums | none}: normalise
    over the step only sums of several parts, as published with classmates, or nothing). reinforce++: normalised over
    the step, without groups ({baseline: group}: centred by the group first). grpo takes {scale: group | step | none}.
    Or 'my_pkg.module:estimator'."""
    loss: Named = Named(name="clipped")
    """rl, ppo: the loss. clipped: the clipped surrogate of PPO and GRPO. gspo: the same with one ratio per sequence.
    cispo: the ratio is a capped weight. reinforce: no ratio. Or 'my_pkg.module:surrogate'."""
    length_norm: Literal["sequence", "token", "constant"] = "token"
    """sequence: mean over each reply, then over replies. token: mean over all tokens of the step. constant: the sum
    divided by the number of replies x `episode.max_tokens` (Dr.GRPO)."""
    clip: ClipConfig = ClipConfig()
    """rl, ppo: bounds of the ratio to the sampling policy; a single number sets both."""
    kl: KLConfig = KLConfig()
    """rl, ppo: the divergence to the initial model; a single number is short for `weight`."""
    entropy: float = Field(0.0, ge=0)
    """rl, ppo: weight of the entropy bonus."""
    importance: ImportanceConfig = ImportanceConfig()
    """rl, ppo: importance weights between sampler and learner; short form: 'truncate' or 'mask'."""
    dpo: DPOConfig = DPOConfig()
    """dpo, online-dpo: how pairs are compared."""
    kto: KTOConfig = KTOConfig()
    """kto: how good and bad replies are weighted."""
    ppo: PPOConfig = PPOConfig()
    """ppo: the value head and its advantages."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning-rate schedule; short form: 'cosine' or 'linear'."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer; short form: 'adamw-8bit'."""
    max_skipped: int = Field(3, ge=1)
    """Stop the run after this many consecutive steps without a finite loss and gradient; such steps do not change the
    weights."""
    save: SaveConfig = SaveConfig()
    """When checkpoints are written and which are kept."""

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
        """Refuse a loss without a ratio for replies sampled by other weights: its gradient would be wrong."""
        if self.loss.name == "reinforce" and self.minibatches > 1:
            raise ValueError(
                f"train.loss 'reinforce' has no ratio, but all of train.minibatches={self.minibatches} after the first "
                f"are off-policy; use train.loss 'clipped' or 'cispo', or train.minibatches=1"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _epochs_alone(cls, value: Any) -> Any:
        """If only epochs are given, they alone set the length."""
        if isinstance(value, dict) and value.get("epochs") is not None and "steps" not in value:
            return {**value, "steps": 0}
        return value

    @property
    def samples(self) -> bool:
        """Whether the method learns from replies that the policy samples."""
        return method_of(self.method).samples

    @property
    def trains_every_fork(self) -> bool:
        """Along the tree: whether branches are trained even if all siblings score the same. A value head needs them,
        and so do the KL penalty and the entropy bonus, which must not depend on how rewards vary."""
        return method_of(self.method).value_head or bool(self.kl.weight or self.entropy)

    def resolve_steps(self, examples: int) -> TrainConfig:
        """The same with `steps` resolved for this many rows or examples."""
        if self.epochs is None:
            return self
        passes = -(-math.ceil(self.epochs * examples) // self.prompts_per_step)
        return self.model_copy(update={"steps": min(self.steps, passes) if self.steps else passes})
