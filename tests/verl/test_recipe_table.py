"""Which recipe runs where: the table of docs/cluster.md, made of the recipes themselves.

python -m tests.verl.test_recipe_table      writes it anew
"""

from __future__ import annotations

from pathlib import Path

from upshot.config.load import list_recipes, load_recipe
from upshot.config.method import method_of
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.verl.config import compose

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
BEGIN, END = "<!-- recipes: begin -->\n", "<!-- recipes: end -->\n"
REFUSAL = "verl cannot run this recipe as it stands: "


def on_verl(recipe: Recipe) -> str:
    """What `--engine verl` makes of a recipe."""
    if not method_of(recipe.train.method).on_ray:
        return f"by torchrun ({recipe.train.method})"
    plan = compose(recipe)
    try:
        plan.check()
    except UserError as error:
        return f"no: {str(error).removeprefix(REFUSAL)}"
    left = [note.partition(":")[0] for note in plan.notes()]
    return f"yes, without `{'`, `'.join(left)}`" if left else "yes"


def make_table() -> str:
    """One line per recipe."""
    lines = ["| recipe | local | torchrun | `--engine verl` |", "|---|---|---|---|"]
    for name in list_recipes():
        recipe = load_recipe(name).recipe
        ranks = "no: vLLM samples for one process" if recipe.model.engine == "vllm" else "yes"
        lines.append(f"| {name} | yes | {ranks} | {on_verl(recipe)} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_recipes_says_what_would_be_refused() -> None:
    page = PAGE.read_text()
    told = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert told == make_table(), "python -m tests.verl.test_recipe_table"


def test_dropout_of_adapters_and_a_monitor_are_left_out_with_a_note() -> None:
    plan = compose(load_recipe("collabllm-grpo").recipe)
    plan.check()
    assert plan.notes() == ["model.lora.dropout=0.1: verl's adapters have none: they are trained without"]
    assert plan.value("actor_rollout_ref.model.lora_rank") == 32
    (note,) = compose(load_recipe("classmate-mini").recipe).notes()
    assert note.startswith("eval.monitor=") and "`upshot eval monitor`" in note


if __name__ == "__main__":
    text = PAGE.read_text()
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:start] + make_table() + text[stop:])
