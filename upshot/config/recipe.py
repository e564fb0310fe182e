"""The recipe: what a YAML file may say, as pydantic models. Loading and overrides are in `config.py`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from upshot.config.model_spec import ModelSpec


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(_as_text)]
"""Words of a command line and environment variables are text where YAML reads numbers: 8192."""


class Section(BaseModel):
    """A part of the recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Named(BaseModel):
    """Something chosen by name; all other keys are its own options, checked against its constructor."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, allow_inf_nan=False)

    name: str
    """A built-in name, or 'my_pkg.module:Thing'."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the named thing."""
        return dict(self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class LoraConfig(Section):
    """Low-rank adapters (peft) instead of full fine-tuning."""

    kind: Literal["lora", "rslora", "dora"] = "lora"
    """rslora: the update is multiplied by alpha / sqrt(r). dora: the length of each output's weights is trained beside
    their direction."""
    r: int = Field(32, ge=1)
    """Rank."""
    alpha: int = Field(16, ge=1)
    """Scale: the update is multiplied by alpha / r (rslora: alpha / sqrt(r))."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on the adapter's input."""
    targets: list[str] | None = None
    """Module names, embed_tokens and lm_head among them; None: those of the adapter that `model.path` holds, else the
    seven projections of Llama-like models, or all linear layers where those are absent."""


class TinyConfig(Section):
    """A new Llama of random weights, for the quickstart and for tests; its tokenizer comes from the task."""

    hidden: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Attention heads."""
    mlp: int = 384
    """Width of the MLP."""
    context: int = 256
    """Most positions."""


class EngineConfig(Section):
    """What samples the policy's replies; a name alone will do."""

    name: Literal["upshot", "vllm"] = "upshot"
    """upshot: the embedded engine, on the learner's own tensors. vllm: a vLLM server of the run's own, which gets the
    learner's weights after every step; see docs/vllm.md."""
    program: str = "vllm"
    """vllm: the program, such as /opt/vllm/bin/vllm; its Python environment may be another one."""
    devices: Literal["policy", "cpu"] | list[int] = "policy"
    """vllm: GPUs by number, among those that are visible. policy: that of `model.device`, where vLLM sleeps while the
    learner works."""
    memory: float | None = Field(None, gt=0, le=1)
    """vllm: share of each of its GPUs; None: 0.9, or 0.4 beside the learner."""
    arguments: list[Text] = Field(default_factory=list)
    """vllm: further words of its command line."""
    environment: dict[str, Text] = Field(default_factory=dict)
    """vllm: further environment variables."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _nothing_idle(self) -> EngineConfig:
        if self.name == "upshot" and self.model_dump(exclude={"name"}, exclude_defaults=True):
            raise ValueError("program, devices, memory, arguments and environment are of engine vllm; set name: vllm")
        return self


class PolicyConfig(Section):
    """The model in training."""

    path: str = ""
    """A Hugging Face folder or name, or 'smollm2-135m'; empty: a new tiny model as `tiny` says."""
    tiny: TinyConfig = TinyConfig()
    """Shape of the new model when `path` is empty."""
    lora: LoraConfig | None = None
    """Train adapters only; None trains all weights."""
    quantize: Literal["none", "4bit"] = "none"
    """4bit: the weights below the adapters in 4 bits (NF4; QLoRA); needs bitsandbytes and `lora`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """auto: the first GPU, else the CPU."""
    chat_template: str | None = None
    """A Jinja chat template (text, or a path to one) instead of the tokenizer's own."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Options passed to the chat template, such as {enable_thinking: false}."""
    max_context: int = Field(0, ge=0)
    """Most tokens of prompt and reply together; 0: what the model's configuration says."""
    gradient_checkpointing: Literal["auto", "none", "block"] = "auto"
    """block (or true): each block is computed again on the way back, a third more work for a fraction of the memory.
    none (or false): never. auto: where the memory plan needs it."""
    memory_gb: float = Field(0.0, ge=0)
    """GiB of the device that the run may plan with; 0: what the GPU has."""
    exact: bool = False
    """Sampler and learner agree bitwise on every log-probability, whatever the batch; slower, see docs/engine.md."""
    engine: EngineConfig = EngineConfig()
    """What samples its replies: upshot (the embedded engine) or vllm."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        return {True: "block", False: "none"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _only_adapters(self) -> PolicyConfig:
        if self.quantize != "none" and self.lora is None:
            raise ValueError("weights in 4 bits cannot be trained: set `lora` beside quantize, or quantize: none")
        return self

    @model_validator(mode="after")
    def _sampled_by_vllm(self) -> PolicyConfig:
        """Refuse what vLLM cannot sample as the learner computes it."""
        if self.engine.name == "upshot":
            return self
        if self.exact:
            raise ValueError("exact: vLLM's kernels are not the learner's; leave it out, or engine: upshot")
        if self.quantize != "none":
            raise ValueError("quantize: vLLM would round the weights in its own way; quantize: none, or engine: upshot")
        if self.lora is not None and (
            self.lora.kind == "dora" or {"embed_tokens", "lm_head"} & {*(self.lora.targets or ())}
        ):
            raise ValueError(
                "lora: vLLM has no DoRA and no adapters on embedding or head; leave those, or engine: upshot"
            )
        return self


class EpisodeConfig(Section):
    """How the trained part of a conversation unfolds."""

    max_turns: int = Field(1, ge=1)
    """Policy turns, with the task's environment between them."""
    max_tokens: int = Field(512, ge=1)
    """Most tokens of one policy turn, in the futures too."""
    temperature: float = Field(1.0, ge=0)
    """Of the policy, in the futures too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus cut; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""
    system: str = ""
    """A system prompt for the policy, put before the row's own messages."""
    long_prompts: Literal["error", "filter", "truncate"] = "error"
    """Rows whose prompt leaves no room for a reply in the model's context. error: refused before the run begins.
    filter: left out. truncate: the beginning of their longest message is left out."""
    think: tuple[str, str] | None = ("<think>", "</think>")
    """Markers around the policy's thoughts, which nobody else hears; None: everything it writes is said."""


class FuturesConfig(Named):
    """How a reply is continued before it is settled; further keys are options of the kind of future."""

    name: str = "talk"
    """talk: a simulated user and the policy talk on. classmates: other models finish the thought. none: nobody does.
    Or 'my_pkg.module:Kind'."""
    samples: int = Field(1, ge=1)
    """Futures per reply; classmates: per classmate."""
    window: int = Field(0, ge=0)
    """talk: rounds (user turn + policy turn) a future may last; 0 scores the reply itself."""
    user: Named | None = None
    """talk: the simulated user; None: the task's own."""

    @property
    def map_file(self) -> str | None:
        """classmates: the file that names them, where `classmates` is a path."""
        named = (self.model_extra or {}).get("classmates")
        return named if isinstance(named, str) else None

    @property
    def options(self) -> dict[str, Any]:
        """The options of the kind, as far as the recipe sets them."""
        own = {"samples": self.samples, "window": self.window}
        default = type(self).model_fields
        return {k: v for k, v in own.items() if v != default[k].default} | dict(self.model_extra or {})


class CreditConfig(Section):
    """Which tokens earn the main reward."""

    by: Literal["reply", "turns"] = "reply"
    """reply: one reward for the whole episode. turns: each turn earns what the environment gave it, or the reward of
    futures forked after it, and what the turns after it earned."""
    tokens: Literal["all", "thought", "answer"] = "all"
    """Which of the sampled tokens are trained."""
    gamma: float = Field(1.0, ge=0, le=1)
    """by turns: what a turn's reward counts for the turn before it."""
    split: bool = False
    """by turns: every turn is a training sample of its own."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"by": value} if isinstance(value, str) else value


class MetricConfig(Named):
    """One metric of the reward; further keys are its own options."""

    weight: float = 1.0
    """Factor on the mean over futures; 0 only logs it."""
    clamp: tuple[float, float] | None = None
    """Bounds of weight x mean."""


class ReplyRuleConfig(Section):
    """What happens to a reply that is not as it should be."""

    rule: Literal["score", "missing", "penalty"] = "score"
    """score: as any other. missing: it leaves the statistics. penalty: it gets `penalty` and no futures."""
    penalty: float = -1.0
    """The reward under the rule 'penalty'."""


class RewardConfig(Section):
    """What a conversation is worth."""

    metrics: list[MetricConfig] = Field(default_factory=lambda: [MetricConfig(name="verifier")])
    """Summed up after weight and clamp."""
    overlong: ReplyRuleConfig = ReplyRuleConfig()
    """Rule for replies cut at `episode.max_tokens`."""
    malformed: ReplyRuleConfig = ReplyRuleConfig()
    """Rule for replies that say nothing and call no tool."""
    manager: Named = Named(name="inline")
    """Where verifiers run: inline, pool or remote."""
    max_missing: float = Field(0.5, ge=0, le=1)
    """A step in which a larger share of the replies has no reward stops the run with the reasons."""


class ImportanceConfig(Section):
    """Weights on tokens whose probability in the learner is not that of the sampler."""

    rule: Literal["none", "truncate", "mask"] = "none"
    """none: the sampler's probabilities count as the learner's. truncate: weigh each token by learner / sampler, cut at
    the bounds. mask: the same, but tokens outside the bounds are not trained. With `model.engine: vllm` truncate where
    nothing is said."""
    level: Literal["token", "sequence"] = "token"
    """One weight a token, or one a sequence."""
    high: float = Field(2.0, gt=0)
    """Upper bound."""
    low: float = Field(0.0, ge=0)
    """Lower bound."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"rule": value} if isinstance(value, str) else value


GROUPED = ("grpo", "dr-grpo", "rloo", "separated", "gdpo")
"""Estimators that compare the replies of a group."""


class TrainConfig(Section):
    """How the policy learns."""

    method: Literal["rl", "sft", "dpo", "online-dpo", "ppo"] = "rl"
    """rl: policy gradient over groups. sft, dpo: from a data file or the task's dialogues. online-dpo: pairs of replies
    ranked by reward. ppo: value head and GAE."""
    data: str | None = None
    """sft, dpo: parquet or JSONL file of `upshot data prepare`; None: the task's own dialogues (sft)."""
    advantage: Named = Named(name="grpo")
    """grpo: centred by the group and divided by its standard deviation. dr-grpo: centred. rloo: leave one out.
    separated: every part centred on its own, then added ({non_negative: true}: only the main part can subtract).
    gdpo: every part normalised, added, normalised over the step. reinforce++: normalised over the step, without groups
    ({baseline: group}: centred by the group before). grpo takes {scale: group | step | none}.
    Or 'my_pkg.module:estimator'."""
    loss: Named = Named(name="clipped")
    """rl, ppo: what is minimised. clipped: the clipped surrogate of PPO and GRPO. gspo: its ratio taken over whole
    sequences. cispo: the ratio is a capped weight. reinforce: no ratio. Or 'my_pkg.module:surrogate'."""
    steps: int = Field(100, ge=0)
    """Optimizer steps (rl, online-dpo, ppo: one round of rollouts each); 0 beside `epochs`: as many as those make."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the rows or examples. With `steps` as well the shorter one ends the training; None: `steps` alone."""
    prompts_per_step: int = Field(16, ge=1)
    """Rows a step; sft and dpo: examples a step."""
    group_size: int = Field(8, ge=1)
    """Replies to each row."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates per round of rollouts; more than one makes the later ones off-policy (clipped)."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """After the warm-up: stay, or fall to `lr * min_lr`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    min_lr: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """Most norm of the gradient."""
    clip_low: float = Field(0.2, ge=0)
    """The ratio to the sampling policy is clipped at 1 - clip_low …"""
    clip_high: float = Field(0.2, ge=0)
    """… and at 1 + clip_high."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the initial model, or with new adapters to the model without them; 0: none."""
    kl_in: Literal["loss", "reward"] = "loss"
    """rl: added to the loss, or its sum over a reply taken off the reply's reward. ppo always takes it off each token's
    reward."""
    kl_estimator: Literal["k2", "k3", "k3-corrected"] = "k3"
    """rl, in the loss: k2: half the square of the log ratio. k3: the low-variance one, GRPO's usual choice.
    k3-corrected: times the ratio to the sampling policy, for the divergence's own gradient."""
    entropy: float = Field(0.0, ge=0)
    """rl, ppo: weight of the entropy bonus."""
    importance: ImportanceConfig = ImportanceConfig()
    """rl, ppo: importance sampling between sampler and learner; 'truncate' or 'mask' for short."""
    dynamic_sampling: int = Field(0, ge=0)
    """rl: while some groups' rewards are all alike, play other rows in their place, so many times a step at most."""
    length_norm: Literal["sequence", "token", "constant"] = "token"
    """sequence: mean over each reply, then over replies. token: mean over all tokens of the step. constant: sum over
    replies x `episode.max_tokens` (Dr.GRPO)."""
    beta: float = Field(0.1, gt=0)
    """dpo, online-dpo: strength of the reference."""
    dpo_loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """dpo, online-dpo: sigmoid: the log-sigmoid of the margin. ipo: the squared distance of the margin a token from
    1 / (2 beta)."""
    min_gap: float = Field(0.0, ge=0)
    """dpo, online-dpo: pairs whose scores differ by less are left out."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """ppo: decay of the advantage."""
    gamma: float = Field(1.0, ge=0, le=1)
    """ppo: discount per token."""
    whiten: bool = True
    """ppo: advantages of a step are shifted and scaled to mean 0 and deviation 1."""
    value_weight: float = Field(0.5, ge=0)
    """ppo: weight of the value loss."""
    token_budget: int = Field(0, ge=0)
    """Most flat tokens of one micro-batch (what replies share counts once); gradients are accumulated over them.
    0 (or auto): as the memory plan finds."""
    optimizer: Literal["adamw", "adamw-8bit"] = "adamw"
    """adamw: float32 state. adamw-8bit: its two moments in 8 bits, in blocks with a scale each."""
    offload_optimizer: bool = False
    """Keep the optimizer's float32 weights and moments on the host, and update them there."""
    save_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end and when stopped."""
    save_minutes: float = Field(0.0, ge=0)
    """Minutes after which a finished step is saved whatever `save_every` says; 0: never."""
    keep: int = Field(2, ge=1)
    """Checkpoints to keep; the newest always stays."""
    keep_best: str | None = None
    """A metric of the evaluations (`eval.every`), such as 'eval/reward/mean': the checkpoint with its largest value
    stays as well. Of losses the smallest, and after 'min ' or 'max ' what that says."""
    max_skipped: int = Field(3, ge=1)
    """So many steps in a row without a finite loss and gradient stop the run; none of them changes the weights."""
    async_steps: int = Field(0, ge=0)
    """rl, online-dpo, ppo: a step's replies are sampled by the weights of so many steps before, while those steps are
    learned; 0: by the newest weights, strictly on-policy."""

    @field_validator("token_budget", mode="before")
    @classmethod
    def _by_plan(cls, value: Any) -> Any:
        return 0 if value == "auto" else value

    @field_validator("kl_estimator", mode="before")
    @classmethod
    def _has_a_gradient(cls, value: Any) -> Any:
        """Refuse k1 with the reason: it would train nothing and look as if it did."""
        if value == "k1":
            raise ValueError(
                "the log ratio k1 has no gradient in a loss (on samples of the policy it is zero in the mean); "
                "take k2 or k3, or train.kl_in=reward, which takes k1 off the reward"
            )
        return value

    @model_validator(mode="after")
    def _groups_compare(self) -> TrainConfig:
        """Refuse groups of one where replies are compared with each other: every advantage would be zero."""
        if self.group_size > 1:
            return self
        if self.method == "online-dpo":
            raise ValueError("online-dpo ranks the replies to a prompt; set train.group_size to 2 or more")
        if self.method == "rl" and self.advantage.name in GROUPED:
            raise ValueError(
                f"train.group_size is 1, but '{self.advantage.name}' compares the replies to a prompt with each other: "
                "every advantage would be 0; set train.group_size to 2 or more, or train.method=ppo"
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
        return self.method in ("rl", "online-dpo", "ppo")

    def lasting(self, examples: int) -> TrainConfig:
        """The same with `steps` as they are over so many rows or examples."""
        if self.epochs is None:
            return self
        passes = -(-math.ceil(self.epochs * examples) // self.prompts_per_step)
        return self.model_copy(update={"steps": min(self.steps, passes) if self.steps else passes})


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
    """sft, dpo: file of held-out examples; None: the dialogues of the split (sft)."""
    rows: int = Field(64, ge=1)
    """Rows or examples of it."""
    samples: int = Field(1, ge=1)
    """Replies to each row; with several, at a temperature above 0, there is pass@k."""
    stop_after: int = Field(0, ge=0)
    """Evaluations in a row without a new best of `train.keep_best` (None: of the reward, or of the loss of sft and dpo)
    that end the training; 0: never."""
    temperature: float = Field(0.0, ge=0)
    """Of the policy in evaluation."""
    monitor: str | None = None
    """A helper model among `models` that reads question and thought only and predicts the verifier's score; None: no
    monitor."""


class BudgetConfig(Section):
    """What the helper models may cost; the run stops cleanly, and can be resumed, when it is used up."""

    max_calls: int | None = None
    """Calls of endpoints and providers."""
    max_tokens: int | None = None
    """Their prompt and completion tokens."""
    max_dollars: float | None = None
    """Their cost."""


class Recipe(Section):
    """One training setting: a task, an episode, futures, a reward and a learner."""

    name: str = "run"
    """Names the run folder."""
    seed: int = 0
    """One seed, one run (on the CPU)."""
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

    @model_validator(mode="after")
    def _weigh_another_engine(self) -> Recipe:
        """vLLM's log-probabilities are not quite the learner's: unless the recipe says otherwise, they are weighed."""
        train = self.train
        if self.model.engine.name == "vllm" and "rule" not in train.importance.model_fields_set:
            told = train.importance.model_copy(update={"rule": "truncate"})
            self.train = train.model_copy(update={"importance": told})
        return self
