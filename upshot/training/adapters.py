"""LoRA adapters: new ones, those of an earlier training, those of a checkpoint.

Where `model.path` is itself an adapter (the checkpoint of an SFT with LoRA), one rule of three holds, and the run says
which: without `model.lora` it is merged into its base model and all weights are trained; with a `model.lora` of its
shape it is trained on; with another shape it is merged, the result is kept in the run folder as `start/`, and new
adapters are trained on that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.config.recipe import LoraConfig, PolicyConfig
from upshot.core.errors import UserError, did_you_mean, import_optional
from upshot.core.files import write_folder
from upshot.engine.llama.eight_bit import PROJECTIONS
from upshot.models.local import adapter_config, describe_choice, load_whole, local_path


@dataclass(frozen=True)
class StartingPoint:
    """What a run begins with."""

    model: str
    """The model to load; empty: a new one."""
    adapter: str = ""
    """The adapter to train on; empty: none, or a new one."""


def find_start(config: PolicyConfig, run: Path, say: Callable[[str], None]) -> StartingPoint:
    """What `model.path` means for this recipe."""
    if config.path and (chosen := describe_choice(config.path)):
        say(f"model.path {chosen}")
    adapter = adapter_config(config.path) if config.path else None
    if adapter is None:
        return StartingPoint(config.path)
    base = adapter["base_model_name_or_path"]
    what = f"model.path '{config.path}' is an adapter of '{base}'"
    if config.lora is None:
        say(f"{what}: it is merged, and all weights are trained")
        return StartingPoint(config.path)
    if same_shape(config.lora, adapter) and adapter_config(base) is None:
        say(f"{what}: training continues on it; the reference is the model with this adapter")
        return StartingPoint(base, local_path(config.path))
    merged = run.resolve() / "start"
    say(f"{what}, in another shape than model.lora: it is merged into '{merged}', and new adapters are trained on that")
    if not merged.is_dir():
        keep_whole(*load_whole(config.path, config.dtype, config.device), merged)
    return StartingPoint(str(merged))


def keep_whole(module: Any, tokenizer: Any, folder: Path, writes: bool = True) -> Path:
    """Save a model that adapters are made for, once; its folder. `writes`: whether this rank does."""

    def write(to: Path) -> None:
        module.save_pretrained(to)
        tokenizer.save_pretrained(to)

    if writes and not folder.is_dir():
        write_folder(folder, write)
    return folder.resolve()


def same_shape(lora: LoraConfig, adapter: Mapping[str, Any]) -> bool:
    """Whether an adapter is what the recipe asks for; where that names no targets, the adapter's own are meant."""
    plain = adapter.get("peft_type") == "LORA" and not adapter.get("rank_pattern") and not adapter.get("alpha_pattern")
    size = (adapter.get("r"), adapter.get("lora_alpha")) == (lora.r, lora.alpha)
    plain &= bool(adapter.get("use_dora")) == (lora.kind == "dora")
    plain &= bool(adapter.get("use_rslora")) == (lora.kind == "rslora")
    targets = adapter.get("target_modules")
    return plain and size and (lora.targets is None or set(targets or ()) == set(lora.targets))


def add_lora(module: Any, config: PolicyConfig, adapter: str = "") -> Any:
    """The module wrapped with adapters where the recipe asks for them: those of a folder, or new ones."""
    if config.lora is None:
        return module
    peft = import_optional("peft", "model.lora needs peft: pip install -e '.[lora]'")
    lora = config.lora
    if adapter:
        settings = peft.PeftConfig.from_pretrained(adapter)
        settings.lora_dropout = lora.dropout
        return peft.PeftModel.from_pretrained(module, adapter, is_trainable=True, config=settings)
    names = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    weighted = [name for name, part in module.named_modules() if hasattr(part, "weight") and part.weight.dim() > 1]
    for target in lora.targets or ():
        if not any(f".{name}".endswith(f".{target}") for name in weighted):
            known = {name.rpartition(".")[2] for name in weighted}
            raise UserError(f"model.lora.targets: the model has no layer '{target}'; {did_you_mean(target, known)}")
    targets: Any = lora.targets or default_targets(names) or "all-linear"
    sizes = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": targets}
    kinds = {f"use_{kind}": lora.kind == kind for kind in ("dora", "rslora")}
    return peft.get_peft_model(module, peft.LoraConfig(**sizes, **kinds, task_type="CAUSAL_LM"))


def default_targets(names: Collection[str]) -> list[str]:
    """The projections of a block among a model's layers; none in families that name them in their own way."""
    return [name for name in PROJECTIONS if name in names]
