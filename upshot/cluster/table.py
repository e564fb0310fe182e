"""Which key of a recipe is which key of verl's config (0.9.x), and which is none: the table behind `config.py`.

Every key of a recipe stands in exactly one of three: `CARRIED` to verl, `PLAYED` by Upshot itself in verl's workers, or
`LEFT` out with the reason. A test holds that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
PROJECT = "upshot"
OPTIM = f"{ACTOR}.optim"


class No(Exception):
    """Why a value has no counterpart in verl."""


@dataclass(frozen=True)
class Line:
    """One key of verl's and the recipe keys that it is made of."""

    theirs: str
    ours: tuple[str, ...]
    make: Callable[..., Any] = lambda value: value
    """From the values of `ours`; raises `No`."""
    note: str = ""


@dataclass(frozen=True)
class Without:
    """A recipe key without counterpart."""

    reason: str
    blocks: bool = False
    """Whether a run that sets it would be another one without it, and is refused."""


def words(known: Mapping[Any, Any], what: str) -> Callable[[Any], Any]:
    """A value by another name; `No` for those that verl does not have."""

    def make(value: Any) -> Any:
        if value not in known:
            raise No(f"verl has no {what} '{value}'; it has {', '.join(map(str, known))}")
        return known[value]

    return make


def _line(theirs: str, ours: str, make: Callable[..., Any] = lambda value: value, note: str = "") -> Line:
    return Line(theirs, tuple(ours.split()), make, note)


def _mini_batch(prompts: int, parts: int) -> int:
    if prompts % parts:
        raise No(f"verl wants minibatches of one size; {prompts} prompts do not make {parts}")
    return prompts // parts


def _lora(read: Callable[[Any], Any], otherwise: Any) -> Callable[[Any], Any]:
    def make(lora: Any) -> Any:
        if lora is None:
            return otherwise
        if lora.kind != "lora":
            raise No(f"verl has no adapters of kind '{lora.kind}'")
        if lora.dropout:
            raise No(f"verl's adapters have no dropout ({lora.dropout:g}); set model.lora.dropout=0")
        return read(lora)

    return make


def _importance(rule: str, level: str) -> str | None:
    if rule == "mask":
        raise No("the rule 'mask' is not mapped yet; take 'truncate' or 'none'")
    return level if rule == "truncate" else None


def _bounded(rule: str, low: float, high: float) -> float:
    if rule == "truncate" and low:
        raise No("verl's truncated weights have no lower bound; set train.importance.low=0")
    return high


LOSSES = {"clipped": "vanilla", "gspo": "gspo", "cispo": "cispo"}
SCHEDULES = {"constant": "constant", "cosine": "cosine"}
NORMS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
CARRIED: tuple[Line, ...] = (
    _line("trainer.experiment_name", "name"),
    _line("data.seed", "seed", note="the order of rows is verl's own, not that of local mode"),
    _line(f"{ROLLOUT}.seed", "seed"),
    _line(f"{MODEL}.lora_rank", "model.lora", _lora(lambda lora: lora.r, 0)),
    _line(f"{MODEL}.lora_alpha", "model.lora", _lora(lambda lora: lora.alpha, 16)),
    _line(f"{MODEL}.target_modules", "model.lora", _lora(lambda lora: lora.targets or "all-linear", "all-linear")),
    _line(f"{ROLLOUT}.dtype", "model.dtype", lambda kind: "bfloat16" if kind == "auto" else kind),
    _line(f"{MODEL}.enable_gradient_checkpointing", "model.gradient_checkpointing", lambda how: how != "none"),
    _line(f"{ROLLOUT}.temperature", "episode.temperature"),
    _line(f"{ROLLOUT}.top_p", "episode.top_p"),
    _line(f"{ROLLOUT}.top_k", "episode.top_k", lambda k: k or -1),
    _line("data.train_batch_size", "train.prompts_per_step"),
    _line(f"{ROLLOUT}.n", "train.group_size"),
    _line(f"{ACTOR}.ppo_mini_batch_size", "train.prompts_per_step train.minibatches", _mini_batch, "in prompts"),
    _line(f"{ACTOR}.policy_loss.loss_mode", "train.loss.name", words(LOSSES, "loss")),
    _line(f"{ACTOR}.loss_agg_mode", "train.length_norm", words(NORMS, "mean")),
    _line(
        f"{ACTOR}.loss_scale_factor",
        "train.length_norm episode.max_tokens",
        lambda norm, tokens: tokens if norm == "constant" else None,
    ),
    _line(f"{ACTOR}.clip_ratio_low", "train.clip_low"),
    _line(f"{ACTOR}.clip_ratio_high", "train.clip_high"),
    _line(f"{ACTOR}.entropy_coeff", "train.entropy"),
    _line(f"{ACTOR}.grad_clip", "train.grad_clip"),
    _line(f"{OPTIM}.clip_grad", "train.grad_clip"),
    _line(f"{OPTIM}.lr", "train.lr"),
    _line(f"{OPTIM}.lr_warmup_steps", "train.warmup_steps"),
    _line(f"{OPTIM}.lr_scheduler_type", "train.schedule", words(SCHEDULES, "schedule")),
    _line(f"{OPTIM}.min_lr_ratio", "train.min_lr"),
    _line(f"{OPTIM}.weight_decay", "train.weight_decay"),
    _line(f"{OPTIM}.betas", "train.betas", list),
    _line(f"{ACTOR}.use_kl_loss", "train.kl train.kl_in", lambda kl, where: bool(kl) and where == "loss"),
    _line(f"{ACTOR}.kl_loss_coef", "train.kl"),
    _line(f"{ACTOR}.kl_loss_type", "train.kl_estimator", words({"k2": "k2", "k3": "low_var_kl"}, "KL estimator")),
    _line("algorithm.use_kl_in_reward", "train.kl train.kl_in", lambda kl, where: bool(kl) and where == "reward"),
    _line("algorithm.kl_ctrl.kl_coef", "train.kl"),
    _line("algorithm.rollout_correction.rollout_is", "train.importance.rule train.importance.level", _importance),
    _line(
        "algorithm.rollout_correction.rollout_is_threshold",
        "train.importance.rule train.importance.low train.importance.high",
        _bounded,
    ),
    _line("trainer.max_actor_ckpt_to_keep", "train.keep"),
    _line("trainer.test_freq", "eval.every", lambda every: every or -1),
    _line("trainer.val_before_train", "eval.every", bool),
    _line(f"{ROLLOUT}.val_kwargs.n", "eval.samples"),
    _line(f"{ROLLOUT}.val_kwargs.temperature", "eval.temperature"),
    _line(f"{ROLLOUT}.val_kwargs.do_sample", "eval.temperature", lambda heat: heat > 0),
    _line("trainer.logger", "trackers", lambda names: ["console", "file", *names]),
)

FIXED: dict[str, tuple[Any, str]] = {
    "algorithm.adv_estimator": ("upshot", "our estimators: missing replies leave a group's statistics"),
    f"{MODEL}.external_lib": ("upshot.cluster.adapters.register", "registers loop and estimator in every process"),
    f"{ROLLOUT}.agent.default_agent_loop": ("upshot", "plays episodes and futures"),
    f"{ROLLOUT}.calculate_log_probs": (True, "the sampler's probabilities are kept with the tokens"),
    f"{ROLLOUT}.tensor_model_parallel_size": (1, "verl's default is 2; raise it where the model needs it"),
    f"{ACTOR}.strategy": ("fsdp2", "what was run"),
    f"{ACTOR}.fsdp_config.model_dtype": ("fp32", "the optimizer's weights are float32, as in local mode"),
    f"{ACTOR}.use_dynamic_bsz": (True, "micro-batches by tokens, as in local mode"),
    f"{ACTOR}.clip_ratio_c": (1e9, "local mode has no second clip"),
    "trainer.project_name": (PROJECT, ""),
    "trainer.resume_mode": ("auto", "a restarted run goes on from its newest checkpoint"),
}

PLAYED: dict[str, str] = {
    "code": "your own code, found in every worker",
    "models": "helper models, called from verl's workers",
    "sandbox": "programs of the policy",
    "call_seconds": "limits of your own code",
    "task": "rows, environment, verdict",
    "episode": "the agent loop",
    "futures": "the agent loop",
    "reward.metrics": "the agent loop; the reward goes back with the rollout",
    "reward.overlong": "the agent loop",
    "reward.malformed": "the agent loop",
    "reward.manager": "the agent loop",
    "credit": "token-level scores and our estimators",
    "train.advantage": "our estimators",
    "model.template_options": "our renderer",
    "eval.split": "which rows are written for validation",
    "eval.rows": "how many rows are written for validation",
}
"""By prefix; keys that `CARRIED` names as well are told to both sides."""

_NOT_YET = "not there yet"
LEFT: dict[str, Without] = {
    "model.quantize": Without("verl has no 4-bit training", True),
    "model.chat_template": Without(f"{_NOT_YET}: save the tokenizer with the template you want", True),
    "model.device": Without("verl's own: trainer.device"),
    "model.memory_gb": Without("verl's own: gpu_memory_utilization, ppo_max_token_len_per_gpu"),
    "model.engine": Without("verl's own: actor_rollout_ref.rollout.name"),
    "model.exact": Without("bitwise agreement is of local mode alone", True),
    "model.tiny": Without(f"{_NOT_YET}: a new tiny model must be made in local mode first"),
    "serve": Without(f"{_NOT_YET}: start it with `upshot serve FILE.yaml` and give the models its addresses", True),
    "reward.max_missing": Without(f"{_NOT_YET}: what is missing is in the log alone"),
    "warm_start": Without(f"{_NOT_YET}: run it in local mode and name its checkpoint as model.path", True),
    "train.data": Without("for sft and dpo, which are not there yet", True),
    "train.loss": Without("options of a loss are of local mode alone", True),
    "train.dynamic_sampling": Without(f"{_NOT_YET}: verl's filter_groups is another rule", True),
    "train.beta": Without("of dpo"),
    "train.dpo_loss": Without("of dpo"),
    "train.min_gap": Without("of dpo"),
    "train.gae_lambda": Without("of ppo"),
    "train.gamma": Without("of ppo"),
    "train.whiten": Without("of ppo"),
    "train.value_weight": Without("of ppo"),
    "train.optimizer": Without("verl's AdamW keeps float32 state; its own offloading: fsdp_config.optimizer_offload"),
    "train.offload_optimizer": Without("verl's own: actor_rollout_ref.actor.fsdp_config.optimizer_offload"),
    "train.save_minutes": Without("verl saves by steps alone"),
    "train.keep_best": Without("verl keeps the newest alone", True),
    "train.max_skipped": Without("verl has no such guard"),
    "train.async_steps": Without("verl's own: trainer.v1.trainer_mode", True),
    "eval.data": Without("for sft and dpo, which are not there yet", True),
    "eval.stop_after": Without("verl does not stop early", True),
    "eval.monitor": Without(f"{_NOT_YET}: `upshot eval monitor` on the run afterwards", True),
    "budget": Without(f"{_NOT_YET}: each worker counts on its own; a budget would hold per process", True),
    "keep_rollouts": Without(f"{_NOT_YET}: no rollouts.jsonl in cluster mode"),
}
"""By prefix."""
