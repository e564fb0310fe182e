"""Which key of a recipe is which key of verl's config (0.9.x), and which is none: the table behind `config.py`.

Every key of a recipe stands in exactly one of three: `CARRIED` to verl, `PLAYED` by Upshot itself in verl's workers, or
`LEFT` out with the reason. A test holds that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from upshot.config.method import method_of

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
PROJECT = "upshot"
AHEAD = "upshot-ahead"
"""The name of our trainer that plays ahead."""
BACKEND = "upshot"
"""The name of our rollout backend in verl (`adapters/rollout.py`)."""
OPTIM = f"{ACTOR}.optim"
REF, CRITIC = "actor_rollout_ref.ref", "critic"


class NoCounterpart(Exception):
    """Why a value has no counterpart in verl."""


@dataclass(frozen=True)
class TableLine:
    """One key of verl's and the recipe keys that it is made of."""

    theirs: str
    ours: tuple[str, ...]
    make: Callable[..., Any] = lambda value: value
    """From the values of `ours`; raises `NoCounterpart`."""
    note: str = ""


@dataclass(frozen=True)
class UnmappedKey:
    """A recipe key without counterpart."""

    reason: str
    blocks: bool = False
    """Whether a run that sets it would be another one without it, and is refused."""


def words(known: Mapping[Any, Any], what: str) -> Callable[[Any], Any]:
    """A value by another name; `NoCounterpart` for those that verl does not have."""

    def make(value: Any) -> Any:
        if value not in known:
            raise NoCounterpart(f"verl has no {what} '{value}'; it has {', '.join(map(str, known))}")
        return known[value]

    return make


def _line(theirs: str, ours: str, make: Callable[..., Any] = lambda value: value, note: str = "") -> TableLine:
    return TableLine(theirs, tuple(ours.split()), make, note)


def _round_up(count: int, parts: int) -> int:
    return -(-count // parts)


def lora(read: Callable[[Any], Any], otherwise: Any) -> Callable[[Any], Any]:
    """Something of the adapters; `otherwise` if there are none."""

    def make(adapter: Any) -> Any:
        if adapter is None:
            return otherwise
        if adapter.kind != "lora":
            raise NoCounterpart(f"verl has no adapters of kind '{adapter.kind}'")
        return read(adapter)

    return make


def _kl(where: str) -> Callable[[float, str, str], bool]:
    """Whether the divergence is taken there; ppo always takes it off the reward."""
    return lambda kl, kl_in, method: bool(kl) and where == ("reward" if method_of(method).value_head else kl_in)


def _schedule(name: str, warmup: int) -> str:
    """verl's constant schedule begins its warm-up with a step at rate 0; its cosine can begin as local mode does."""
    if name not in SCHEDULES:
        raise NoCounterpart(f"verl has no schedule '{name}'; it has {', '.join(SCHEDULES)}")
    return "cosine" if warmup else name


LOSSES = {"clipped": "vanilla", "gspo": "gspo", "cispo": "cispo"}
SCHEDULES = ("constant", "cosine")
NORMS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
SAMPLER = "trainer.v1.sampler.custom_sampler"
CARRIED: tuple[TableLine, ...] = (
    _line("trainer.v1.trainer_mode", "train.async_steps", lambda ahead: AHEAD if ahead else "upshot", "our trainers"),
    _line("trainer.v1.colocate_async.num_warmup_batches", "train.async_steps", lambda _: 0, "ours sends them out"),
    _line(
        f"{SAMPLER}.path", "train.async_steps", lambda ahead: "pkg://upshot.verl.adapters.replies" if ahead else None
    ),
    _line(f"{SAMPLER}.name", "train.async_steps", lambda ahead: "OwnStepBuffer" if ahead else None),
    _line("trainer.experiment_name", "name"),
    _line("data.seed", "seed", note="the order of rows and the seeds of conversations are local mode's"),
    _line(f"{ROLLOUT}.seed", "seed"),
    _line(f"{MODEL}.lora_rank", "model.lora", lora(lambda own: own.r, 0)),
    _line(f"{MODEL}.lora_alpha", "model.lora", lora(lambda own: own.alpha, 16)),
    _line(f"{MODEL}.target_modules", "model.lora", lora(lambda own: own.targets or "all-linear", "all-linear")),
    _line(f"{ROLLOUT}.dtype", "model.dtype", lambda kind: "bfloat16" if kind == "auto" else kind),
    _line(f"{MODEL}.enable_gradient_checkpointing", "model.gradient_checkpointing", lambda how: how != "none"),
    _line(f"{ROLLOUT}.temperature", "episode.temperature"),
    _line(f"{ROLLOUT}.top_p", "episode.top_p"),
    _line(f"{ROLLOUT}.top_k", "episode.top_k", lambda k: k or -1),
    _line("data.train_batch_size", "train.prompts_per_step"),
    _line(f"{ROLLOUT}.n", "train.group_size"),
    _line(
        f"{ACTOR}.ppo_mini_batch_size",
        "train.prompts_per_step train.minibatches",
        _round_up,
        "our trainer counts rows",
    ),
    _line(f"{ACTOR}.policy_loss.loss_mode", "train.loss.name", words(LOSSES, "loss")),
    _line(f"{ACTOR}.loss_agg_mode", "train.length_norm", words(NORMS, "mean")),
    _line(
        f"{ACTOR}.loss_scale_factor",
        "train.length_norm episode.max_tokens",
        lambda norm, tokens: tokens if norm == "constant" else None,
    ),
    _line(f"{ACTOR}.clip_ratio_low", "train.clip.low"),
    _line(f"{ACTOR}.clip_ratio_high", "train.clip.high"),
    _line(f"{ACTOR}.entropy_coeff", "train.entropy"),
    _line(f"{ACTOR}.grad_clip", "train.optimizer.grad_clip"),
    _line(f"{OPTIM}.clip_grad", "train.optimizer.grad_clip"),
    _line(f"{OPTIM}.lr", "train.lr"),
    _line(f"{OPTIM}.lr_warmup_steps", "train.schedule.warmup_steps train.minibatches", _round_up, "verl's count steps"),
    _line(f"{OPTIM}.lr_scheduler_type", "train.schedule.name train.schedule.warmup_steps", _schedule),
    _line(
        f"{OPTIM}.min_lr_ratio",
        "train.schedule.min_lr train.schedule.name",
        lambda least, name: 1.0 if name == "constant" else least,
    ),
    _line(f"{OPTIM}.zero_indexed_step", "train.schedule.warmup_steps", lambda steps: steps == 0),
    _line(f"{OPTIM}.weight_decay", "train.optimizer.weight_decay"),
    _line(f"{OPTIM}.betas", "train.optimizer.betas", list),
    _line(f"{ACTOR}.use_kl_loss", "train.kl.weight train.kl.where train.method", _kl("loss")),
    _line(f"{ACTOR}.kl_loss_coef", "train.kl.weight"),
    _line(f"{ACTOR}.kl_loss_type", "train.kl.estimator", words({"k2": "k2", "k3": "low_var_kl"}, "KL estimator")),
    _line("algorithm.use_kl_in_reward", "train.kl.weight train.kl.where train.method", _kl("reward")),
    _line(
        "algorithm.adv_estimator",
        "train.method",
        lambda how: "gae" if method_of(how).value_head else "grpo",
        "not asked",
    ),
    _line(
        "trainer.max_actor_ckpt_to_keep", "train.save.keep", lambda keep: max(keep, 2), "verl drops the old one first"
    ),
    _line("trainer.max_critic_ckpt_to_keep", "train.save.keep", lambda keep: max(keep, 2)),
    _line("trainer.test_freq", "eval.every", lambda every: every or -1),
    _line("trainer.val_before_train", "eval.every", bool),
    _line(f"{ROLLOUT}.val_kwargs.n", "eval.samples"),
    _line(f"{ROLLOUT}.val_kwargs.temperature", "eval.temperature"),
    _line(f"{ROLLOUT}.val_kwargs.do_sample", "eval.temperature", lambda heat: heat > 0),
)

FIXED: dict[str, tuple[Any, str]] = {
    f"{ROLLOUT}.agent.default_agent_loop": ("upshot", "plays episodes and futures"),
    "data.custom_cls.path": ("pkg://upshot.verl.adapters.dataset", "ids of rows, which workers look up"),
    "data.custom_cls.name": ("RowIds", ""),
    f"{ROLLOUT}.calculate_log_probs": (True, "the sampler's probabilities are kept with the tokens"),
    f"{ACTOR}.clip_ratio_c": (1e9, "local mode has no second clip"),
    "trainer.logger": (["console"], "our trainer writes metrics.jsonl and tells the trackers"),
    "trainer.resume_mode": ("auto", "a restarted run goes on from its newest checkpoint"),
}
"""What a run consists of; with other values it would be a different run, or fail."""
LIBRARY = "upshot.verl.adapters.register"
USUAL: dict[str, tuple[Any, str]] = {
    f"{MODEL}.external_lib": ([LIBRARY], "registers the agent loop in every process; yours are imported after it"),
    "reward.num_workers": (0, "processes of verl's that would score: the reward comes with the rollout"),
    f"{ROLLOUT}.tensor_model_parallel_size": (1, "verl's default is 2; raise it where the model needs it"),
    f"{ACTOR}.strategy": ("fsdp2", "what was run"),
    f"{ACTOR}.fsdp_config.model_dtype": ("fp32", "the optimizer's weights are float32, as in local mode"),
    f"{ACTOR}.use_dynamic_bsz": (True, "micro-batches by tokens, as in local mode"),
    "trainer.project_name": (PROJECT, ""),
}
"""Defaults that the command line may change."""
OF_FSDP = (
    *(f"{ACTOR}.strategy", f"{ACTOR}.grad_clip", f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config"),
    *(f"{OPTIM}.lr_scheduler_type", f"{OPTIM}.min_lr_ratio", f"{OPTIM}.zero_indexed_step"),
    *(f"{CRITIC}.strategy", f"{CRITIC}.grad_clip", f"{CRITIC}.fsdp"),
    *(f"{CRITIC}.optim.{name}" for name in ("lr_scheduler_type", "min_lr_ratio", "zero_indexed_step")),
)
"""What only FSDP has, by prefix: left out where the command line takes another engine (`model_engine`)."""
REFUSED: dict[str, str] = {
    "algorithm": "advantages, value targets, KL and importance are our trainer's: see train.* of the recipe",
    "data.train_files": "the rows are the recipe's: task",
    "data.val_files": "the rows are the recipe's: task, eval.split, eval.rows",
    "data.val_batch_size": "all rows of an evaluation are looked at together: eval.rows",
    "data.gen_batch_size": "a step plays train.prompts_per_step",
    "data.train_max_samples": "the rows are the recipe's: task",
    "data.val_max_samples": "the rows are the recipe's: eval.rows",
    "data.max_prompt_length": "measured; model.max_context and episode.long_prompts say what is too long",
    "data.max_response_length": "set episode.max_tokens, or model.max_context for several turns",
    f"{ROLLOUT}.prompt_length": "measured; model.max_context and episode.long_prompts say what is too long",
    f"{ROLLOUT}.response_length": "set episode.max_tokens, or model.max_context for several turns",
    f"{ROLLOUT}.max_model_len": "set model.max_context",
    f"{ROLLOUT}.logprobs_mode": "follows from episode.top_p and top_k",
    f"{ROLLOUT}.val_kwargs": "an evaluation's sampling is the recipe's: eval.temperature, eval.samples",
    f"{MODEL}.path": "set model.path",
    "trainer.total_training_steps": "set train.steps or train.epochs",
    "trainer.total_epochs": "set train.steps or train.epochs",
    "trainer.v1": "verl's own trainers are not run: train.async_steps chooses between ours (docs/cluster.md)",
    "trainer.use_v1": "our trainer is one of verl's v1",
    "trainer.save_freq": "set train.save.every",
    "trainer.default_local_dir": "set run_dir",
}
"""Keys of verl's that we set from the recipe without a line of the table, or that would do nothing or harm; by prefix.
The ways out are recipe keys."""

PLAYED: dict[str, str] = {
    "code": "your own code, found in every worker",
    "models": "helper models, called from verl's workers",
    "serve": "servers that this command brings up, called from verl's workers",
    "sandbox": "programs of the policy",
    "verdict": "programs of the policy",
    "call_seconds": "limits of your own code",
    "budget": "one actor for all workers",
    "task": "rows, environment, verdict",
    "episode": "the agent loop",
    "futures": "the agent loop",
    "reward.metrics": "the agent loop; the reward goes back with the rollout",
    "reward.overlong": "the agent loop",
    "reward.malformed": "the agent loop",
    "reward.manager": "the agent loop",
    "credit": "the agent loop and our trainer",
    "train.advantage": "our trainer",
    "train.importance": "our trainer",
    "train.dynamic_sampling": "our trainer",
    "train.ppo.gae_lambda": "our trainer (ppo)",
    "train.ppo.gamma": "our trainer (ppo)",
    "train.ppo.whiten": "our trainer (ppo)",
    "reward.blamed": "our trainer",
    "reward.max_missing": "our trainer: it stops the run with the reasons",
    "model.template_options": "our renderer",
    "model.tiny": "a new model is made before verl starts",
    "warm_start": "run by local mode before verl starts, once, in RUN/warm-start",
    "eval.split": "which rows are written for validation",
    "eval.rows": "how many rows are written for validation",
    "eval.judge": "who judges the replies to them",
    "trackers": "called by our trainer, under local mode's names",
    "keep_rollouts": "rollouts.jsonl, written by our trainer",
}
"""By prefix; keys that `CARRIED` names as well go to both sides."""

_NOT_YET = "not there yet"
LEFT: dict[str, UnmappedKey] = {
    "model.quantize": UnmappedKey("verl has no 4-bit training", True),
    "model.chat_template": UnmappedKey(f"{_NOT_YET}: save the tokenizer with the template you want", True),
    "model.end_token": UnmappedKey(f"{_NOT_YET}: save the tokenizer with a template that ends turns", True),
    "model.device": UnmappedKey("verl's own: trainer.device"),
    "model.memory_gb": UnmappedKey("verl's own: gpu_memory_utilization, ppo_max_token_len_per_gpu"),
    "model.engine": UnmappedKey("verl's own: actor_rollout_ref.rollout.name"),
    "model.exact": UnmappedKey("bitwise agreement is of local mode alone", True),
    "train.data": UnmappedKey("for sft and dpo", True),
    "train.loss": UnmappedKey("options of a loss are of local mode alone", True),
    "train.dpo": UnmappedKey("of dpo"),
    "train.kto": UnmappedKey("of kto"),
    "train.ppo.value_weight": UnmappedKey(
        "of ppo: verl's critic is a network of its own, with an optimizer of its own"
    ),
    "train.optimizer.name": UnmappedKey(
        "verl's AdamW keeps float32 state; its own offloading: fsdp_config.optimizer_offload"
    ),
    "train.optimizer.offload": UnmappedKey("verl's own: actor_rollout_ref.actor.fsdp_config.optimizer_offload"),
    "train.save.minutes": UnmappedKey("verl saves by steps alone"),
    "train.save.best": UnmappedKey("verl keeps the newest alone", True),
    "train.max_skipped": UnmappedKey("verl has no such guard"),
    "eval.data": UnmappedKey("for sft and dpo", True),
    "eval.stop_after": UnmappedKey("verl does not stop early", True),
    "eval.monitor": UnmappedKey("it only looks on; `upshot eval monitor` on the run afterwards"),
}
"""By prefix."""
