"""The model in training and what is made of it: tokenizer, renderer, engine, sampler, learner, reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from upshot.config.phases import phases_of
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.conversation import Row, derive_seed
from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.models.base import PolicySampler
from upshot.models.rendering import policy_renderer
from upshot.rollout.episode import Policy
from upshot.rollout.prompt_length import build_prompt_filter, filter_rows
from upshot.serving.swap.pool import ModelPool
from upshot.tasks.base import Task
from upshot.training.adapters import StartingPoint, add_lora, find_start, keep_whole
from upshot.training.learner.distributed.ranks import ALONE, Ranks
from upshot.training.learner.forward.select import set_checkpointing
from upshot.training.learner.learner import Learner
from upshot.training.learner.memory.fit import plan_loaded
from upshot.training.learner.memory.plan import GIB, MemoryPlan, usable
from upshot.training.setup import context_limit, load_policy, sampling_of, seed_torch
from upshot.training.snapshots import PolicyModel, load_weights, save_weights


@dataclass(eq=False)
class PolicyBundle:
    """A recipe's policy, loaded: as the run begins with it, or as a checkpoint holds it."""

    recipe: Recipe
    task: Task
    run: Path
    """The run's folder."""
    checkpoint: Path | None
    say: Callable[[str], None]
    ranks: Ranks = ALONE
    pool: ModelPool | None = None
    """Helper models that take turns on the policy's device."""

    def __post_init__(self) -> None:
        recipe, say = self.recipe, self.say
        seed_torch(recipe.seed)
        # One rank looks: what has to be merged is merged once.
        start = find_start(recipe.model, self.run, say) if self.ranks.first else StartingPoint("")
        self.start = self.ranks.broadcast_object("start", start)
        saved = str(self.checkpoint or "")
        module, self.tokenizer = self._load("" if recipe.model.lora else saved)
        if recipe.model.lora and not self.start.model:  # nobody else could make this one again
            module.name_or_path = str(keep_whole(module, self.tokenizer, self.run / "base", self.ranks.first))
        self.module: Any = add_lora(module, recipe.model, saved or self.start.adapter)
        if self.module.device.type == "cuda":
            torch.cuda.set_device(self.module.device)  # a micro-batch is measured there before there is a learner
        self.renderer = policy_renderer(self.tokenizer, recipe)
        template = self.renderer.check()
        if not template.appends:
            say(f"chat template: {template.reason}; turns are rendered one by one instead, and the history is kept")
        if template.words:
            words = ", ".join(map(repr, template.words))
            say(
                f"chat template: it marks turns with ordinary text ({words}); a space is put into such text in messages"
            )

    @cached_property
    def engine(self) -> Engine:
        """The engine on the policy's own tensors; made for the first rollout, so that sft and dpo need none."""
        return Engine(self.module, self.renderer.end_ids, engine_settings(self.recipe, self.memory))

    @cached_property
    def sampler(self) -> PolicySampler:
        """The policy as a model that samples."""
        if self.recipe.model.engine.name == "vllm":
            from upshot.serving.vllm.launch import find, share_of
            from upshot.serving.vllm.policy import VllmPolicy

            address = find(self.recipe, self.run)
            if address.same_gpu:
                total = torch.cuda.get_device_properties(self.module.device).total_memory
                check_beside(self.memory, share_of(self.recipe), total)
            return VllmPolicy(address, self.module, self.tokenizer, self.renderer, self.run, self.say)
        return PolicyModel(self.engine, self.tokenizer, self.renderer, self.module)

    @cached_property
    def memory(self) -> MemoryPlan:
        """The memory plan of the recipe's method."""
        return plan_loaded(self.recipe, self.module, self.recipe.train, self.ranks.size)

    @property
    def samples(self) -> bool:
        """Whether the sampler was made."""
        return "sampler" in self.__dict__  # where `cached_property` puts it

    def speaker(self) -> Policy:
        """The policy as a speaker."""
        episode, sampling = self.recipe.episode, sampling_of(self.recipe)
        system, tools = episode.system, self.task.tools()
        return Policy(self.sampler, self.renderer, sampling, self.max_context, system, tools, episode.think)

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and reply together."""
        return context_limit(self.recipe.model, self.module)

    def fit_prompts(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows whose prompt leaves room for a reply, by the recipe's rule for those that do not."""
        lengths = build_prompt_filter(self.recipe, self.task, self.renderer, self.max_context)
        return filter_rows(rows, lengths, self.recipe.episode.long_prompts)

    def learner(self, config: TrainConfig, value_head: bool = False) -> Learner:
        """A new learner on the policy."""
        sampled, episode = config.samples, self.recipe.episode
        config = configure_learner(config, plan_loaded(self.recipe, self.module, config, self.ranks.size), self.module)
        temperature, exact = episode.temperature if sampled else 1.0, self.recipe.model.exact and sampled
        # Who samples is told of new weights; sft and dpo need no sampler, and have none made.
        changed = self.sampler.weights_changed if sampled or self.samples else lambda: None
        how = (config, episode.max_tokens, temperature, changed, value_head, exact, self.ranks)
        return Learner(self.module, self.tokenizer, *how)

    def keep_reference(self, learner: Learner, phase: str, begun: bool) -> None:
        """Give the learner the model that its phase began with; one that had begun before finds it again."""
        saved = self.run / "reference"
        # The whole of a model that is where the recipe says is not kept a second time.
        elsewhere = phase == phases_of(self.recipe)[0] and self.recipe.model.lora is None
        if not begun:
            learner.keep_reference()
            if not elsewhere and self.ranks.first:
                save_weights(saved, learner.reference)
        elif elsewhere:
            learner.keep_reference(dict(self._load()[0].named_parameters()))
        else:
            learner.keep_reference(load_weights(saved))

    def _load(self, path: str = "") -> tuple[Any, Any]:
        """Module, without adapters, and tokenizer: those of a folder, or those that the run began with."""
        seed = derive_seed(self.recipe.seed, "weights")
        return load_policy(self.recipe.model, self.task, seed, path or self.start.model, self.start.adapter)


def engine_settings(recipe: Recipe, plan: MemoryPlan) -> EngineSettings:
    """The engine of the policy, as the plan has it."""
    weights, kv, merge = recipe.model.engine.weights, recipe.model.engine.kv, plan.setting.merge
    return EngineSettings(exact=recipe.model.exact, kv_bytes=plan.kv_bytes, merge=merge, weights=weights, kv=kv)


def configure_learner(config: TrainConfig, plan: MemoryPlan, module: Any) -> TrainConfig:
    """The phase's configuration with the plan's micro-batches; the module computes again what the plan says."""
    set_checkpointing(module, plan.setting.checkpointing, plan.setting.layers)
    return config.model_copy(update={"token_budget": config.token_budget or plan.setting.tokens})


def configure_helpers(recipe: Recipe, plan: MemoryPlan) -> Recipe:
    """The recipe with the plan's keys and values for helper models; roles with the same spec share one model."""
    planned = [(recipe.models[name], kv / GIB) for name, kv in plan.helper_kv.items() if name in recipe.models and kv]
    models = dict(recipe.models)
    for role, spec in recipe.models.items():
        models[role] = next((spec.model_copy(update={"kv_gb": gib}) for other, gib in planned if other == spec), spec)
    return recipe.model_copy(update={"models": models})


def check_beside(plan: MemoryPlan, share: float, total: int) -> None:
    """Refuse a GPU on which vLLM, awake, does not fit beside what the learner keeps."""
    kept, taken = plan.sampling, int(share * total)
    if total and kept + taken > usable(total):
        whole, vllm, learner, most = (size / GIB for size in (total, taken, kept, usable(total)))
        raise UserError(
            f"model.engine.memory {share:g} of {whole:.1f} GiB is {vllm:.1f}, and the learner keeps {learner:.1f} "
            f"(weights, optimizer) while vLLM samples: more than {most:.1f}; lower model.engine.memory, set "
            "train.optimizer.offload or optimizer: adamw-8bit, or give vLLM other devices"
        )
