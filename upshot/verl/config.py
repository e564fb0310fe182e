"""A recipe → verl's config: every value with its origin, and the parts of the recipe without a counterpart.

Nothing is loaded or written, and neither torch nor verl is imported. It only checks whether vLLM is installed.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from upshot.config.method import method_of
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.rollout.credit.rules import credit_rule
from upshot.rollout.futures.classmates.map_file import classmate_names
from upshot.verl.helpers import describe_helpers, find_unplaceable
from upshot.verl.plan import (
    RECIPE,
    TOKENS,
    UNKNOWN,
    UNMADE,
    WORKERS,
    ClusterPlace,
    MissingKey,
    VerlPlan,
    VerlSetting,
    carry_over,
    find_uncarried,
    is_under,
    parse_override,
)
from upshot.verl.table import (
    ACTOR,
    AS_POLICY,
    BACKEND,
    CARRIED,
    CRITIC,
    FIXED,
    LIBRARY,
    MODEL,
    OF_FSDP,
    OPTIM,
    PLAYED,
    REF,
    REFUSED,
    ROLLOUT,
    USUAL,
)


def compose(recipe: Recipe, place: ClusterPlace | None = None, more: Sequence[str] = ()) -> VerlPlan:
    """verl's config of a recipe; `more` are verl's own `key=value`, which take precedence."""
    place = place or ClusterPlace()
    if recipe.warm_start is not None and recipe.warm_start.new_model_only and recipe.model.path:
        recipe = recipe.model_copy(update={"warm_start": None})  # local mode would skip it as well
    settings, missing = carry_over(recipe, CARRIED)
    fixed = (FIXED | USUAL).items()
    settings += [VerlSetting(key, value, f"fixed: {why}" if why else "fixed") for key, (value, why) in fixed]
    vllm = importlib.util.find_spec("vllm") is not None
    backend = ("vllm", "vLLM is installed here") if vllm else (BACKEND, "our engine: vLLM is not installed")
    settings.append(VerlSetting(f"{ROLLOUT}.name", *backend))
    settings += [*_lengths(recipe, place), *_places(recipe, place), *_precision(recipe)]
    settings += _critic(recipe, settings) if method_of(recipe.train.method).value_head else []
    steps, refused = _steps(recipe, place)
    overrides = {setting.key: setting for setting in map(parse_override, more)}
    refuse_ours(overrides.values(), settings)
    if (libraries := overrides.get(f"{MODEL}.external_lib")) is not None:
        theirs = libraries.value if isinstance(libraries.value, list) else [libraries.value]
        overrides[libraries.key] = replace(libraries, value=list(dict.fromkeys([LIBRARY, *theirs])))
    kept = {setting.key: setting for setting in [*settings, *steps, *_attention(recipe)]} | overrides
    sampler, unknown = _truncation(recipe, str(kept[f"{ROLLOUT}.name"].value))
    kept |= {setting.key: setting for setting in sampler}
    if kept[f"{ROLLOUT}.name"].value == BACKEND and recipe.model.lora:
        merge = VerlSetting(f"{MODEL}.lora.merge", True, "model.lora: our engine takes them merged, verl rounds them")
        kept = {merge.key: merge} | kept
    engine = str(overrides["model_engine"].value) if "model_engine" in overrides else "dp"
    if engine != "dp":
        of_fsdp = [key for key in kept if any(is_under(key, prefix) for prefix in OF_FSDP)]
        kept = {key: setting for key, setting in kept.items() if key in overrides or key not in of_fsdp}
        unknown = [*unknown, *_other_engine(recipe, engine)]
    return VerlPlan(
        tuple(kept.values()),
        (*PLAYED.items(), *describe_helpers(recipe)),
        (*missing, *refused, *unknown, *find_uncarried(recipe), *_find_unfit(recipe)),
    )


def _other_engine(recipe: Recipe, engine: str) -> Iterator[MissingKey]:
    """The settings without a counterpart in engines other than FSDP: they have their own schedules."""
    if recipe.train.schedule.name != "constant" or recipe.train.schedule.warmup_steps:
        why = f"{engine} has its own schedules ({OPTIM}.lr_decay_style …): set a constant one without warm-up"
        yield MissingKey("train.schedule", recipe.train.schedule.model_dump(mode="json"), why, True)
    why = f"{engine} was never run; its checkpoints are verl's to merge (verl.model_merger), and not resumed here"
    yield MissingKey("model_engine", engine, why, False)


def refuse_ours(overrides: Iterable[VerlSetting], settings: Sequence[VerlSetting]) -> None:
    """Refuse overrides of verl keys that the recipe sets or that define the run: it would be a different run."""
    ours = {setting.key: setting for setting in settings}
    table = {line.theirs: f"set {' or '.join(line.ours)} of the recipe" for line in CARRIED}
    known = REFUSED | {key: why or "it is fixed" for key, (_, why) in FIXED.items()} | table
    refused = []
    for setting in overrides:
        prefixes = [key for key in known if is_under(setting.key, key)]
        same = setting.key in ours and ours[setting.key].value == setting.value
        if prefixes and not same:
            refused.append(f"{setting.key} cannot be set on the command line: {known[max(prefixes, key=len)]}")
    if refused:
        raise UserError("; ".join(refused))


def _attention(recipe: Recipe) -> list[VerlSetting]:
    """The attention implementation: verl's default is flash attention, with which it fails if that is not installed."""
    if importlib.util.find_spec("flash_attn") is not None:
        return []
    why = "flash-attn, verl's default, is not installed here"
    models = [MODEL, *([f"{CRITIC}.model"] if method_of(recipe.train.method).value_head else [])]
    settings = [VerlSetting(f"{model}.override_config.attn_implementation", "sdpa", why, "+") for model in models]
    return [*settings, *(VerlSetting(f"{model}.use_remove_padding", False, why) for model in models)]


def _truncation(recipe: Recipe, backend: str) -> tuple[list[VerlSetting], list[MissingKey]]:
    """Which distribution a server's log-probabilities refer to if top_p or top_k cut it.

    The trainer's refer to the whole distribution at the sampling temperature, and so do our engine's. vLLM knows two
    kinds: after the cut (verl's default, which is wrong here), and before cut and temperature, right at temperature 1.
    """
    episode = recipe.episode
    cuts = {"top_p": episode.top_p < 1, "top_k": episode.top_k > 0}
    if backend == BACKEND or not any(cuts.values()):
        return [], []
    key = next(f"episode.{name}" for name, cut in cuts.items() if cut)
    if backend == "vllm" and episode.temperature == 1:
        why = "vLLM's default are probabilities after the cut; the trainer's are before it"
        return [VerlSetting(f"{ROLLOUT}.logprobs_mode", "raw_logprobs", f"{key}: {why}")], []
    why = f"{backend} gives no log-probabilities of the distribution before the cut at temperature "
    why += f"{episode.temperature:g}; set episode.temperature=1, or set {ROLLOUT}.name={BACKEND}"
    if backend != "vllm":
        why = f"the kind of log-probabilities that {backend} reports is unknown; set {ROLLOUT}.name={BACKEND}, or vllm"
    return [], [MissingKey(key, attrgetter(key)(recipe), why, True)]


def _lengths(recipe: Recipe, place: ClusterPlace) -> list[VerlSetting]:
    """The maximum lengths of prompts, replies and batches."""
    prompt: Any = UNKNOWN if place.prompt_tokens is None else place.prompt_tokens
    context = recipe.model.max_context or place.context
    room = None if context is None or place.prompt_tokens is None else context - 1
    single = recipe.episode.max_turns == 1 and not credit_rule(recipe.credit).trains_futures
    reply: Any = recipe.episode.max_tokens if single else (UNKNOWN if room is None else room)
    source = "model.max_context" if recipe.model.max_context else "the model's configuration"
    budget = recipe.train.token_budget or max(TOKENS, context or 0)
    return [
        VerlSetting("data.max_prompt_length", prompt, "measured: the longest prompt of the rows"),
        VerlSetting("data.max_response_length", reply, "episode.max_tokens" if single else f"{source} (several turns)"),
        VerlSetting(f"{ROLLOUT}.max_model_len", context or UNKNOWN, f"{source}; futures need room, too"),
        VerlSetting(f"{ACTOR}.ppo_max_token_len_per_gpu", budget, "train.token_budget (0: verl's own, or the context)"),
    ]


def _places(recipe: Recipe, place: ClusterPlace) -> list[VerlSetting]:
    """The files of the run."""
    env = "ray_kwargs.ray_init.runtime_env.env_vars"
    made = recipe.warm_start is not None or not recipe.model.path
    return [
        VerlSetting(f"{MODEL}.path", UNMADE if made else recipe.model.path, "model.path"),
        VerlSetting("data.train_files", f"{place.folder}/data/train.json", "the rows of `task`, split train"),
        VerlSetting("data.val_files", f"{place.folder}/data/validation.json", "eval.split, eval.rows"),
        VerlSetting("trainer.default_local_dir", f"{place.folder}/checkpoints", "run_dir"),
        VerlSetting(f"{env}.{RECIPE}", f"{place.folder}/{WORKERS}", "run_dir", "++"),
    ]


def _precision(recipe: Recipe) -> list[VerlSetting]:
    """verl computes in bfloat16 unless the config names another type."""
    if recipe.model.dtype != "float32":
        return []
    kinds = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engines = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config")  # and the critic like the actor
    return [VerlSetting(f"{engine}.mixed_precision", kinds, "model.dtype", "++") for engine in engines]


def _critic(recipe: Recipe, settings: Sequence[VerlSetting]) -> list[VerlSetting]:
    """For ppo: the critic is a separate network, which starts as a copy of the policy and has the same schedule."""
    critic = [
        VerlSetting(f"{CRITIC}.enable", True, "train.method"),
        VerlSetting(f"{CRITIC}.model.path", recipe.model.path or UNKNOWN, "model.path"),
        VerlSetting(f"{CRITIC}.cliprange_value", recipe.train.clip.high, "train.clip.high"),
    ]
    for setting in settings:
        for ours, theirs in AS_POLICY.items():
            if is_under(setting.key, ours):
                critic.append(replace(setting, key=theirs + setting.key.removeprefix(ours)))
    return critic


def _steps(recipe: Recipe, place: ClusterPlace) -> tuple[list[VerlSetting], list[MissingKey]]:
    """How long to train, and when to save; a checkpoint at the end is always written."""
    train = recipe.train
    if place.rows is None:
        steps: Any = train.steps or UNKNOWN
        epochs: Any = UNKNOWN
    elif place.rows < train.prompts_per_step:
        why = f"verl needs a whole batch of rows; there are {place.rows}"
        return [], [MissingKey("train.prompts_per_step", train.prompts_per_step, why, True)]
    else:
        steps = train.resolve_steps(place.rows).steps
        epochs = max(1, math.ceil(steps / (place.rows // train.prompts_per_step)))
    return [
        VerlSetting("trainer.total_training_steps", steps, "train.steps, train.epochs"),
        VerlSetting("trainer.total_epochs", epochs, "measured: as many as the steps need"),
        VerlSetting("trainer.save_freq", train.save.every or steps, "train.save.every (0: at the end)"),
    ], []


def _find_unfit(recipe: Recipe) -> Iterator[MissingKey]:
    """What verl's hooks do not support yet."""
    if not method_of(recipe.train.method).on_ray:
        yield MissingKey("train.method", recipe.train.method, "rl and ppo run on verl, the others by torchrun", True)
    if recipe.model.lora and recipe.model.lora.dropout:
        why = "verl's adapters have none: they are trained without"
        yield MissingKey("model.lora.dropout", recipe.model.lora.dropout, why, False)
    if recipe.model.lora and (recipe.warm_start is not None or not recipe.model.path):
        why = "adapters of a warm start are not carried over; run it in local mode and set model.path to its result"
        yield MissingKey("model.lora", recipe.model.lora.model_dump(mode="json"), why, True)
    if recipe.train.async_steps:
        why = "conversations under way at an update continue with the new weights (verl's trainer), not the old ones"
        yield MissingKey("train.async_steps", recipe.train.async_steps, why, False)
    if credit_rule(recipe.credit).trains_futures:
        yield from _find_unweighed(recipe)
    if recipe.episode.agent is not None:
        why = "the contexts of a program's episode are not carried to verl's rows yet: run it locally"
        yield MissingKey("episode.agent", recipe.episode.agent.program, why, True)
    if recipe.task.name == "verifiers":
        why = "the environment calls the policy itself, in contexts that are not carried to verl's rows yet"
        yield MissingKey("task.name", recipe.task.name, why, True)
    yield from _find_copies(recipe)
    yield from find_unplaceable(recipe)


def _find_unweighed(recipe: Recipe) -> Iterator[MissingKey]:
    """The parts of the loss that cannot be weighted row by row: a branch of the futures counts less than a reply."""
    train = recipe.train
    why = "along the tree a branch counts for its share, and verl weights only advantages"
    if train.kl.weight and train.kl.where == "loss" and not method_of(train.method).value_head:
        yield MissingKey("train.kl.where", "loss", f"{why}: set train.kl.where=reward, or credit.by=reply", True)
    if train.entropy:
        yield MissingKey("train.entropy", train.entropy, f"{why}: set train.entropy=0, or credit.by=reply", True)


def _find_copies(recipe: Recipe) -> Iterator[MissingKey]:
    """The helpers that verl's servers cannot be: models with older weights, or scorers of given ids."""
    classmates = classmate_names(recipe.futures)
    models = {f"models.{role}": spec.model for role, spec in recipe.models.items()}
    copies = [("futures.classmates", name) for name in classmates if name.startswith("policy@")]
    for key, model in (*models.items(), *copies):
        if model.startswith("policy@"):
            way = f"; name the folder itself: {key}={recipe.model.path or 'FOLDER'}" if model.endswith("@start") else ""
            yield MissingKey(key, model, f"verl's servers have only the newest weights{way}", True)
    itself = [name for name in classmates if models.get(f"models.{name}", name) == "policy"]
    if itself and recipe.futures.options.get("measure", "sampled") != "sampled":
        why = f"verl's servers report no log-probabilities of given ids, and classmate '{itself[0]}' is the policy"
        yield MissingKey("futures.measure", recipe.futures.options["measure"], why, True)
