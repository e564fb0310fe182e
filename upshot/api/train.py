"""Recipes as a library: `upshot.load` resolves one, `upshot.train` runs it.

    recipe = upshot.load("quickstart", train={"steps": 20}, reward={"metrics": ["verifier", polite]})
    run = upshot.train(recipe)
    print(run.steps[-1]["reward/mean"], run.best)

Wherever a recipe has a name, a function or a class may be given: `task=Riddles`, `metrics: [polite]`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from upshot.api.reward import one_line
from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.core.event_loop import anywhere
from upshot.core.files import write_jsonl
from upshot.run.folder import RunFolder

if TYPE_CHECKING:
    from upshot.run.console import Reporter

Data = str | Path | Iterable[Mapping[str, Any]]
"""A file, a folder, a Hub name, or the records themselves: a list of mappings, a `datasets.Dataset`."""
DATA = "data/train.jsonl"
"""The file in a run folder that holds the records the run was given."""
Part = Mapping[str, Any] | str | None
"""A section of a recipe: some of its keys, its short form, or None where it may be left out."""


class RecipeOverrides(TypedDict, total=False):
    """The keyword arguments of `load` and `train`: sections of a recipe, which override its own."""

    name: str
    seed: int
    run_dir: str | Path
    code: list[str]
    model: Part
    models: Mapping[str, Any]
    serve: str | None
    sandbox: str
    verdict: str
    call_seconds: float
    task: Mapping[str, Any] | str | type
    episode: Part
    futures: Part
    reward: Part
    credit: Part
    warm_start: Part
    train: Part
    eval: Part
    budget: Part
    trackers: list[str]
    keep_rollouts: int


class _Unset:
    """Stands in a signature for an argument that is left out."""

    def __repr__(self) -> str:
        return "…"


def _list_overrides(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a notebook's help and `inspect.signature` list the keys that `**overrides` accepts."""
    *arguments, _ = inspect.signature(function).parameters.values()
    bare = [parameter.replace(annotation=Parameter.empty) for parameter in arguments]  # a line of types is unreadable
    sections = [Parameter(name, Parameter.KEYWORD_ONLY, default=_Unset()) for name in RecipeOverrides.__annotations__]
    function.__signature__ = inspect.Signature([*bare, *sections])  # type: ignore[attr-defined]
    return function


def load(recipe: str | Path | Mapping[str, Any] | Recipe, **overrides: Unpack[RecipeOverrides]) -> Recipe:
    """Resolve a recipe without running it, and return it.

        recipe = upshot.load("quickstart", train={"steps": 20}, **{"model.tiny.layers": 1})

    recipe: the name of a recipe that ships with the project, the path of a YAML file, a mapping, or a `Recipe`.

    All other arguments are sections or keys of the recipe, which override its own. A mapping changes keys of its
    section (`train={"steps": 20}`), a dotted key sets one value (`**{"train.steps": 20}`). You can pass a function or
    class wherever a recipe names one: `reward={"metrics": ["verifier", polite]}`. docs/reference.md lists all keys.
    """
    with one_line():
        return _load(recipe, overrides)


def _load(recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Mapping[str, Any]) -> Recipe:
    source = recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else recipe
    return load_recipe(source, overrides).recipe


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    data: Data | None = None,
    *,
    reporter: Reporter | None = None,
    progress: bool | None = None,
    **overrides: Unpack[RecipeOverrides],
) -> RunFolder:
    """Run a recipe to its end in this process, and return the run folder (`upshot.runs`).

        run = upshot.train("quickstart", train={"steps": 20}, seed=1)
        print(run.steps[-1]["reward/mean"], run.best)

    recipe: as in `load`, and so are all further arguments.
    data: the data to learn from instead of the recipe's: a file, a folder, a Hub name, or a list of mappings. Its
    records are rows of the task; for sft dialogues, for dpo pairs.
    progress: whether to show a bar and the latest numbers; None: in a terminal and in a notebook.
    reporter: receives phases and steps instead of the bar.

    If the fix is on your side, it raises `UserError` with one line. An interrupted run continues with the command
    `upshot train --resume RUN`.
    """
    with one_line():
        chosen = _load(recipe, overrides)
        shown = reporter or _reporter(progress)
        try:
            return anywhere(lambda: _train(chosen, data, shown))
        finally:
            if shown is not None:  # a recipe that was refused has no end to report
                shown.close()


_list_overrides(load)
_list_overrides(train)


def _reporter(progress: bool | None) -> Reporter | None:
    """Shows a person the progress of the run; None if nobody watches."""
    watched = sys.stdout.isatty() or "ipykernel" in sys.modules
    if not (watched if progress is None else progress):
        return None
    from upshot.run.console import PlainReporter, RichReporter

    return RichReporter() if watched else PlainReporter()


def _train(recipe: Recipe, data: Data | None, reporter: Reporter | None) -> RunFolder:
    from upshot.rollout.check_names import check_names
    from upshot.run.run import train as run

    if data is None:
        return run(recipe, None, reporter)
    check_names(recipe)
    folder = RunFolder.create(recipe)
    try:
        recipe = _with_data(recipe, data, folder.path)
        folder.write_recipe(recipe)
        return run(recipe, folder, reporter)
    except BaseException:
        folder.drop_failed_start()
        raise


def _with_data(recipe: Recipe, data: Data, folder: Path) -> Recipe:
    """The recipe with what it learns from; records are written into the run folder, so that it can be resumed."""
    if not isinstance(data, str | Path):
        path = folder / DATA
        write_jsonl(path, _records(data))
        data = path.resolve()
    return _load(recipe, {"task.file" if recipe.train.samples else "train.data": str(data)})


def _records(data: Iterable[Any]) -> list[Mapping[str, Any]]:
    records = list(data)
    if not records:
        raise UserError("data has no rows")
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise UserError(f"data[{number}] is {record!r:.80} ({type(record).__name__}): a row is a mapping")
    return records
