"""Supervised training on verl: a recipe → the config of verl's SFT trainer, dialogues → parquet.

The rows hold what local mode would train on: ids and loss masks by our renderer, in the order of the data; which of
them a step takes is local mode's choice as well (`adapters/sft.py`). Pure but for `write_examples`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upshot.config.recipe import Recipe
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.tasks.base import Task, tasks
from upshot.tasks.datasets.records import read_dialogues
from upshot.verl.plan import (
    TOKENS,
    UNKNOWN,
    ClusterPlace,
    MissingKey,
    VerlPlan,
    VerlSetting,
    carry_over,
    find_uncarried,
    parse_override,
)
from upshot.verl.table import PROJECT, SCHEDULES, NoCounterpart, TableLine, lora, words

if TYPE_CHECKING:
    import pyarrow

ENTRY = "upshot.verl.adapters.sft"
KEPT = ("model.", "train.", "eval.", "serve")
"""Recipe keys that mean something where nothing is played."""


def _token(norm: str) -> str:
    if norm != "token":
        raise NoCounterpart(f"verl's SFT loss is a mean over tokens; train.length_norm is '{norm}'")
    return "no_padding"


def _line(theirs: str, ours: str, make: Any = lambda value: value, note: str = "") -> TableLine:
    return TableLine(theirs, tuple(ours.split()), make, note)


CARRIED: tuple[TableLine, ...] = (
    _line("trainer.experiment_name", "name"),
    _line("trainer.seed", "seed"),
    _line("engine.seed", "seed"),
    _line("model.path", "model.path", lambda path: path or UNKNOWN),
    _line("model.lora_rank", "model.lora", lora(lambda own: own.r, 0)),
    _line("model.lora_alpha", "model.lora", lora(lambda own: own.alpha, 16)),
    _line("model.target_modules", "model.lora", lora(lambda own: own.targets or "all-linear", "all-linear")),
    _line("model.enable_gradient_checkpointing", "model.gradient_checkpointing", lambda how: how != "none"),
    _line("data.train_batch_size", "train.prompts_per_step"),
    _line("data.pad_mode", "train.length_norm", _token, "verl's mean over the tokens of a step"),
    _line("optim.lr", "train.lr"),
    _line("optim.lr_warmup_steps", "train.schedule.warmup_steps"),
    _line("optim.lr_scheduler_type", "train.schedule.name", words(SCHEDULES, "schedule")),
    _line("optim.min_lr_ratio", "train.schedule.min_lr"),
    _line("optim.weight_decay", "train.optimizer.weight_decay"),
    _line("optim.betas", "train.optimizer.betas", list),
    _line("optim.clip_grad", "train.optimizer.grad_clip"),
    _line("trainer.max_ckpt_to_keep", "train.save.keep", lambda keep: max(keep, 2), "verl drops the old one first"),
    _line("trainer.test_freq", "eval.every", lambda every: every or -1),
)
FIXED: dict[str, tuple[Any, str]] = {
    "data.custom_cls.path": (f"pkg://{ENTRY}", "ids and masks of our renderer"),
    "data.custom_cls.name": ("Examples", ""),
    "data.use_dynamic_bsz": (True, "micro-batches by tokens, as in local mode"),
    "engine.strategy": ("fsdp2", "what was run"),
    "engine.model_dtype": ("fp32", "the optimizer's weights are float32, as in local mode"),
    "trainer.nnodes": (1, "torchrun on this node"),
    "trainer.n_gpus_per_node": (1, "verl's default"),
    "trainer.total_epochs": (1, "the order of all steps is one pass of our sampler"),
    "trainer.project_name": (PROJECT, ""),
    "trainer.logger": (["console", "file"], "the launching process reads the file; trackers are told by it"),
    "trainer.resume_mode": ("auto", "a restarted run goes on from its newest checkpoint"),
}
LOCAL: dict[str, tuple[Any, str]] = {
    "trainer.device": ("cpu", ""),
    "model.use_remove_padding": (False, "the fused kernels are for GPUs"),
    "+model.override_config.attn_implementation": ("sdpa", "the fused kernels are for GPUs"),
    "engine.use_torch_compile": (False, "compiling takes longer than a small run"),
    "data.num_workers": (0, "small runs need none"),
}
"""What `--local` sets."""


def compose_sft(recipe: Recipe, place: ClusterPlace, more: Sequence[str] = (), local: bool = False) -> VerlPlan:
    """The config of verl's SFT trainer; `more` are its own `key=value`, which win."""
    if local and recipe.model.dtype == "auto":  # as in local mode: many CPUs have no bfloat16 arithmetic
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "float32"})})
    settings, missing = carry_over(recipe, CARRIED)
    fixed = {key: (value, f"fixed: {why}" if why else "fixed") for key, (value, why) in FIXED.items()}
    here = {key: (value, f"--local: {why}" if why else "--local") for key, (value, why) in LOCAL.items() if local}
    settings += [_setting(key, *told) for key, told in fixed.items()]
    settings += [*_places(recipe, place), *_steps(recipe, place), *_precision(recipe)]
    own = {setting.key: setting for setting in map(parse_override, more)}
    settings += [_setting(key, *told) for key, told in here.items()]
    kept = {setting.key: setting for setting in settings} | own
    plan = VerlPlan(tuple(kept.values()), (), (*missing, *_left(recipe)))
    return VerlPlan(plan.settings, (), (*plan.missing, *_unfit(recipe, plan)), _program(plan))


def _setting(key: str, value: Any, source: str) -> VerlSetting:
    return VerlSetting(key.lstrip("+"), value, source, "+" if key[0] == "+" else "")


def _places(recipe: Recipe, place: ClusterPlace) -> list[VerlSetting]:
    context = recipe.model.max_context or place.context
    validation = f"{place.folder}/data/sft-validation.parquet" if recipe.eval.every else None
    budget = recipe.train.token_budget or max(TOKENS, context or 0)
    return [
        VerlSetting(
            "data.train_files", f"{place.folder}/data/sft-train.parquet", "train.data, or the task's dialogues"
        ),
        VerlSetting("data.val_files", validation, "eval.data, eval.split, eval.rows (eval.every=0: none)"),
        VerlSetting("data.max_length", context or UNKNOWN, "model.max_context, or the model's configuration"),
        VerlSetting("data.max_token_len_per_gpu", budget, "train.token_budget (0: verl's own, or the context)"),
        VerlSetting("trainer.default_local_dir", f"{place.folder}/checkpoints", "run_dir"),
    ]


def _steps(recipe: Recipe, place: ClusterPlace) -> list[VerlSetting]:
    train = recipe.train
    steps: Any = train.lasting(place.rows).steps if place.rows is not None else train.steps or UNKNOWN
    return [
        VerlSetting("trainer.total_training_steps", steps, "train.steps, train.epochs"),
        VerlSetting("trainer.save_freq", train.save.every or steps, "train.save.every (0: at the end)"),
    ]


def _precision(recipe: Recipe) -> list[VerlSetting]:
    if recipe.model.dtype != "float32":
        return []
    kinds = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    return [VerlSetting("engine.mixed_precision", kinds, "model.dtype", "++")]


def _left(recipe: Recipe) -> list[MissingKey]:
    """What has no counterpart, of the keys that mean something here."""
    return [
        found
        for found in find_uncarried(recipe)
        if found.key.startswith(KEPT) and found.key not in ("train.data", "eval.data")
    ]


def _unfit(recipe: Recipe, plan: VerlPlan) -> Iterator[MissingKey]:
    """What verl's SFT trainer cannot be told."""
    if not recipe.model.path:
        yield MissingKey("model.path", "", "a new tiny model must be made in local mode first", True)
    if recipe.warm_start is not None and not (recipe.warm_start.new_model_only and recipe.model.path):
        yield MissingKey("warm_start", True, "sft is the warm start; set warm_start=null", True)
    if (nodes := plan.value("trainer.nnodes")) != 1:
        why = "verl's SFT trainer is started by torchrun on one node; on several, start `torchrun` on each by hand"
        yield MissingKey("train.method", f"sft on {nodes} nodes", why, True)
    elif recipe.train.prompts_per_step % plan.ranks:
        why = f"verl wants as many rows on each of {plan.ranks} ranks"
        yield MissingKey("train.prompts_per_step", recipe.train.prompts_per_step, why, True)


def _program(plan: VerlPlan) -> tuple[str, ...]:
    ranks = str(plan.value("trainer.n_gpus_per_node"))
    return ("torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m", ENTRY)


def prepare_sft(recipe: Recipe, folder: Path, renderer: Renderer, context: int) -> ClusterPlace:
    """Write the rendered dialogues of a recipe under a run folder; what was measured on the way."""
    from upshot.training.loops.validation import held_out_dialogues

    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    data = recipe.train.data
    dialogues = read_dialogues(data) if data else task.dialogues("train")
    if not dialogues:
        raise UserError(f"task '{task.name}' has no dialogues to imitate; set train.data=FILE")
    rows = write_examples(folder / "data" / "sft-train.parquet", dialogues, renderer, context, task)
    if recipe.eval.every:
        looked_at = held_out_dialogues(recipe, task)
        write_examples(folder / "data" / "sft-validation.parquet", looked_at, renderer, context, task)
    return ClusterPlace(str(folder.resolve()), rows, None, context)


def write_examples(
    path: Path, dialogues: Sequence[tuple[Message, ...]], renderer: Renderer, context: int, task: Task
) -> int:
    """Write dialogues as local mode trains them: ids and masks, those without an assistant left out; how many."""
    from upshot.tasks.datasets.parquet import write_parquet
    from upshot.training.loops.sft import Dialogues

    data = Dialogues(dialogues, renderer, context, task.tools())
    if not data:
        raise UserError("no dialogue has an assistant turn to imitate")
    write_parquet(path, [{"ids": datum.ids, "mask": datum.mask} for datum in data], schema())
    return len(data)


def schema() -> pyarrow.Schema:
    """The arrow schema of the files."""
    import pyarrow as pa

    return pa.schema([("ids", pa.list_(pa.int32())), ("mask", pa.list_(pa.int8()))])
