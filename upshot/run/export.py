"""A trained model as others take it: a checkpoint without what a resume needs, merged if asked, with a model card.

The card says what the model is made of, by which recipe, on what data, with what results (`card.md.j2`). It is public:
no paths of this machine, and of the helper models only their names. Torch is imported only to merge an adapter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from upshot.config.recipe import Recipe
from upshot.core.errors import UserError, import_optional
from upshot.core.files import write_folder
from upshot.run.checkpoints import Checkpoint
from upshot.run.folder import VERSIONS, RunFolder
from upshot.training.metrics.best import evaluated_step

CARD = "README.md"
COPIED = (".safetensors", ".json", ".jinja", ".model", ".txt", ".py")
"""Endings of the files of a Hugging Face folder …"""
OWN = ("state.json", "counters.json")
"""… and those that only a resume needs."""
RESULTS = ("reward/mean", "reward/missing", "metric/", "part/", "task/pass@", "loss/", "dpo/", "eval/")
"""What the card's table of results has, in this order."""


def export(folder: RunFolder, checkpoint: str = "", merge: bool = False, out: Path | None = None) -> Path:
    """Write a checkpoint of a run as a Hugging Face folder; where it lies."""
    chosen = find_checkpoint(folder, checkpoint)
    out = out or folder.path / f"export-{chosen.path.name}{'-merged' if merge else ''}"
    adapter = _adapter(chosen.path)

    def write(to: Path) -> None:
        if merge and adapter is not None:
            merge_adapter(chosen.path, to)
        else:
            for file in sorted(chosen.path.iterdir()):
                if file.suffix in COPIED and file.name not in OWN:
                    shutil.copy2(file, to / file.name)
        base = None if adapter is None else str(adapter["base_model_name_or_path"])
        (to / CARD).write_text(model_card(folder, chosen, base, merged=merge), encoding="utf-8")

    write_new_folder(out, write)
    return out


def write_new_folder(out: Path, write: Callable[[Path], None]) -> None:
    """A folder that is whole or not there; what lies there already is never replaced."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"'{out}' already exists; remove it, or choose another place with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_folder(out, write)


def find_checkpoint(folder: RunFolder, wanted: str = "") -> Checkpoint:
    """A checkpoint by its step or name, 'best' or 'last'; '': the best one where one was kept, else the last."""
    saved = folder.checkpoints.saved()
    if not saved:
        state = folder.status.get("state", "not begun")
        learned = f"it finished {len(folder.steps)} steps" if folder.steps else "it finished no step"
        raise UserError(
            f"'{folder.path}' has no checkpoint to export: the run is {state} and {learned}; "
            f"continue it with `upshot train --resume {folder.path}` (train.save.every saves on the way)"
        )
    best = folder.checkpoints.best()
    if wanted == "best" and best is None:
        raise UserError(f"'{folder.path}' kept no best checkpoint; set train.save.best, or choose a step")
    if wanted in ("", "best") and best is not None:
        wanted = best
    if wanted in ("", "last"):
        return saved[-1]
    for one in reversed(saved):
        if wanted in (one.path.name, str(one.step)):
            return one
    names = ", ".join(one.path.name for one in saved)
    raise UserError(f"'{folder.path}' has no checkpoint '{wanted}'; there are {names}")


def push(out: Path, name: str) -> str:
    """Upload a folder to the Hugging Face hub, into a private repository; its address."""
    hub = import_optional("huggingface_hub", "--push needs huggingface_hub: pip install huggingface_hub")
    if hub.get_token() is None:
        raise UserError(
            f"there is no token for the Hugging Face hub: run `hf auth login` or set HF_TOKEN; the folder is at '{out}'"
        )
    adapter = _adapter(out)
    if adapter is not None and not public_name(base := str(adapter["base_model_name_or_path"])):
        raise UserError(f"the adapter in '{out}' needs its base '{base}', which others lack; export with --merge")
    try:
        return upload(out, name)
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError, OSError) as error:
        raise UserError(f"cannot push to '{name}': {str(error).splitlines()[0]}. The folder is at '{out}'") from error


def upload(out: Path, name: str) -> str:
    """The upload itself."""
    import huggingface_hub as hub

    api = hub.HfApi()
    address = api.create_repo(name, private=True, exist_ok=True)
    api.upload_folder(repo_id=name, folder_path=out, commit_message="upload by upshot export")
    return str(address)


def _adapter(path: Path) -> dict[str, Any] | None:
    file = path / "adapter_config.json"
    return json.loads(file.read_text()) if file.is_file() else None


def merge_adapter(checkpoint: Path, to: Path) -> None:
    """The adapter in its base model: added in float32 and rounded once, to the base's own type."""
    from upshot.models.local import find_config, load_whole

    kind = getattr(find_config(str(checkpoint)), "dtype", None)
    module, tokenizer = load_whole(str(checkpoint), "float32", "cpu")
    if kind is not None:
        module = module.to(kind)
    module.save_pretrained(to)
    tokenizer.save_pretrained(to)


def model_card(folder: RunFolder, checkpoint: Checkpoint, base: str | None, merged: bool) -> str:
    """The card in Markdown."""
    from jinja2 import Environment

    recipe = folder.recipe
    start = base or recipe.model.path
    public, adapter = public_name(start), base is not None and not merged
    front = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    front |= {"base_model": public} if public else {}
    cards = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    cards.filters["file_name"] = lambda path: Path(path).name
    return cards.from_string((files("upshot.run") / "card.md.j2").read_text("utf-8")).render(
        recipe=recipe,
        checkpoint=checkpoint,
        adapter=adapter,
        front=yaml.safe_dump({**front, "tags": ["upshot"]}, sort_keys=False),
        origin=public or (f"a local model ({Path(start).name})" if start else "a new model of random weights"),
        version=folder.read_object(VERSIONS).get("upshot", ""),
        results=_results(folder.lines(checkpoint.phase), checkpoint.step),
        options=_without_paths(recipe.task.options),
        settings=public_recipe(recipe),
    )


def public_name(name: str) -> str:
    """A model's name on the hub; '' for a folder of this machine."""
    local = not name or name.startswith((".", "/", "~")) or Path(name).exists() or name.count("/") > 1
    return "" if local else name


def public_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, defaults left out, without paths and addresses of this machine."""
    data: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    data.pop("run_dir", None)
    data.pop("sandbox", None)
    if data.get("models"):
        data["models"] = {role: public_name(spec.model) or "local" for role, spec in recipe.models.items()}
    return yaml.safe_dump(_without_paths(data), sort_keys=False, allow_unicode=True)


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _results(lines: Sequence[Mapping[str, Any]], step: int) -> list[tuple[str, float, float]]:
    """Each metric with its first and last number up to the exported step."""
    results = []
    for prefix in RESULTS:
        for name in dict.fromkeys(name for line in lines for name in line if name.startswith(prefix)):
            step_of = evaluated_step if name.startswith("eval/") else itemgetter("step")
            logged = [line[name] for line in lines if line.get(name) is not None and step_of(line) <= step]
            if logged:
                results.append((name, logged[0], logged[-1]))
    return results
