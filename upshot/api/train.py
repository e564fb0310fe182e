"""Recipes as a library: `upshot.load` resolves one, `upshot.train` runs it.

    recipe = upshot.load("quickstart", train={"steps": 20}, reward={"metrics": ["verifier", polite]})
    run = upshot.train(recipe)
    print(run.metrics[-1]["reward/mean"], run.checkpoint)

Functions and classes stand wherever a recipe has a name: `task=Riddles`, `metrics: [polite]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upshot.api.reward import one_line
from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.core import jsonl
from upshot.core.errors import UserError
from upshot.core.event_loop import anywhere
from upshot.run.tables import Run
from upshot.run.tables import read as read_run

if TYPE_CHECKING:
    from upshot.run.reporter import Reporter

Data = str | Path | Iterable[Mapping[str, Any]]
"""A file, a folder, a Hub name, or the records themselves: a list of mappings, a `datasets.Dataset`."""
DATA = "data/train.jsonl"
"""In a run folder: the records that the run was given."""


def load(recipe: str | Path | Mapping[str, Any] | Recipe, **overrides: Any) -> Recipe:
    """A recipe by name, by path, as a mapping or as it is, with overrides.

    A mapping is laid over the section of its name (`train={"steps": 20}`); a dotted key sets one value
    (`**{"train.steps": 20}`).
    """
    with one_line():
        given = recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else recipe
        return load_recipe(given, overrides).recipe


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    data: Data | None = None,
    *,
    reporter: Reporter | None = None,
    **overrides: Any,
) -> Run:
    """Run a recipe to its end in this process; the run, as tables.

    data: what to learn from, instead of what the recipe names: rows of the task, or dialogues or pairs for sft and dpo.
    reporter: is told of phases and steps; None: nobody is. overrides: as in `load`.
    """
    chosen = load(recipe, **overrides)
    with one_line():
        return anywhere(lambda: _train(chosen, data, reporter))


def _train(recipe: Recipe, data: Data | None, reporter: Reporter | None) -> Run:
    from upshot.rollout.services import check_names
    from upshot.run.folder import RunFolder
    from upshot.run.run import train as run

    if data is None:
        return read_run(run(recipe, None, reporter).path)
    check_names(recipe)
    folder = RunFolder.create(recipe)
    try:
        recipe = _with_data(recipe, data, folder.path)
        folder.write_recipe(recipe)
        return read_run(run(recipe, folder, reporter).path)
    except BaseException:
        folder.drop_failed_start()
        raise


def _with_data(recipe: Recipe, data: Data, folder: Path) -> Recipe:
    """The recipe with what it learns from; records are written into the run folder, so that it can be resumed."""
    if not isinstance(data, str | Path):
        path = folder / DATA
        path.parent.mkdir(parents=True, exist_ok=True)
        jsonl.write(path, _records(data))
        data = path.resolve()
    key = "train.data" if recipe.train.method in ("sft", "dpo") else "task.file"
    return load(recipe, **{key: str(data)})


def _records(data: Iterable[Any]) -> list[Mapping[str, Any]]:
    records = list(data)
    if not records:
        raise UserError("data holds no rows")
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise UserError(f"data[{number}] is {record!r:.80} ({type(record).__name__}): a row is a mapping")
    return records
