"""The card of a trained model: what it is made of, by which recipe, on what data, with what results. No torch.

Written to be public: no paths of this machine, and of the helper models only their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from upshot.config.recipe import Recipe
from upshot.run.checkpoints import Checkpoint
from upshot.run.folder import RunFolder
from upshot.training.metrics.best import evaluated

CARD = "README.md"
RESULTS = ("reward/mean", "reward/missing", "metric/", "part/", "task/pass@", "loss/", "dpo/", "eval/")
"""What the table of results has, in this order."""


def model_card(folder: RunFolder, checkpoint: Checkpoint, base: str | None, merged: bool = False) -> str:
    """The card in Markdown."""
    recipe = folder.recipe
    start = base or recipe.model.path
    origin = public_name(start) or (f"a local model ({Path(start).name})" if start else "a new model of random weights")
    lines = folder.lines(checkpoint.phase)
    adapter = base is not None and not merged
    parts = [
        _front_matter(public_name(start), adapter),
        f"# {recipe.name}\n",
        f"{'A LoRA adapter of' if adapter else 'Trained from'} {origin} with Upshot {_version(folder)}: "
        f"`{recipe.train.method}`, {checkpoint.step} steps"
        f"{' (warm start)' if checkpoint.phase == 'warm-start' else ''}, seed {recipe.seed}.\n",
        "## Use\n",
        _use(adapter),
        "## Results\n",
        _results(lines, checkpoint.step),
        "## Data\n",
        _data(recipe),
        "## Recipe\n",
        "What differs from the defaults; `upshot train` takes it as a file.\n",
        f"```yaml\n{public_recipe(recipe)}```\n",
    ]
    return "\n".join(parts)


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


def _front_matter(base: str, adapter: bool) -> str:
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    front |= {"base_model": base} if base else {}
    return f"---\n{yaml.safe_dump({**front, 'tags': ['upshot']}, sort_keys=False)}---\n"


def _version(folder: RunFolder) -> str:
    file = folder.path / "versions.json"
    return str(json.loads(file.read_text()).get("upshot", "")) if file.is_file() else ""


def _use(adapter: bool) -> str:
    note = "# loads the base model and puts the adapter on it (pip install peft)\n" if adapter else ""
    return (
        f"```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n{note}"
        'model = AutoModelForCausalLM.from_pretrained("THIS FOLDER", dtype="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")\n```\n'
    )


def _results(lines: Sequence[Mapping[str, Any]], step: int) -> str:
    """The first and the last number of each metric up to the exported step."""
    rows = []
    for prefix in RESULTS:
        names = dict.fromkeys(name for line in lines for name in line if name.startswith(prefix))
        for name in names:
            told = [(line[name], line) for line in lines if line.get(name) is not None]
            seen = [
                value for value, line in told if (evaluated(line) if name.startswith("eval/") else line["step"]) <= step
            ]
            if seen:
                rows.append(f"| {name} | {seen[0]:.4g} | {seen[-1]:.4g} |")
    return "\n".join(["| metric | first | last |", "|---|---|---|", *rows, ""]) if rows else "None were recorded.\n"


def _step(line: Mapping[str, Any]) -> int:
    return int(line["step"])


def _data(recipe: Recipe) -> str:
    options = ", ".join(f"{key}: {value}" for key, value in _without_paths(recipe.task.options).items())
    said = [f"- task: `{recipe.task.name}`" + (f" ({options})" if options else "")]
    if recipe.train.data:
        said.append(f"- examples: `{Path(recipe.train.data).name}`")
    said.append(f"- {recipe.train.prompts_per_step} a step")
    if recipe.eval.every:
        held_out = Path(recipe.eval.data).name if recipe.eval.data else f"split `{recipe.eval.split}`"
        said.append(f"- held out: {held_out}, {recipe.eval.rows} rows, {recipe.eval.samples} sample(s) each")
    return "\n".join([*said, ""])
