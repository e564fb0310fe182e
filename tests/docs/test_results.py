"""docs/results.md and README match the runs' data; every recipe has a line; pictures are current."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from upshot.config.load import RECIPES, dump_recipe, load_recipe
from upshot.offline.demo.quickstart import COLUMNS, STEPS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text()
README = (DOCS.parent / "README.md").read_text()


def test_tables_and_pictures_are_generated_from_the_runs() -> None:
    made = runpy.run_path(str(DOCS / "draw_results.py"))
    names = ("table", "other_worlds", "other_ways", "gsm8k_table", "classmates_table", "quickstart_table")
    tables = [made[name]() for name in (*names, "demo_seeds_table")]
    assert all(table in PAGE for table in tables), "run: python docs/draw_results.py"
    estimators = runpy.run_path(str(DOCS / "draw_estimators.py"))
    settings = runpy.run_path(str(DOCS / "draw_settings.py"))
    for table in (*estimators["TABLES"], *settings["TABLES"]):
        page = README if table.__name__ == "claim_table" else PAGE
        assert table() in page, f"run: python docs/draw_results.py, and copy {table.__name__}"
    for name, draw in estimators["PICTURES"].items():
        assert (DOCS / name).read_text() == draw(), "run: python docs/draw_results.py"


def test_readme_and_tour_show_ranges_that_hold_every_kept_table_of_the_demo() -> None:
    made = runpy.run_path(str(DOCS / "draw_results.py"))
    tables = made["demo_tables"]()
    ranges = made["demo_ranges"](tables)
    machines = {f"{kind}, seed {seed}, {STEPS} steps" for kind in ("aarch64", "x86_64") for seed in range(5)}
    assert machines == {", ".join(table["machine"].split(", ")[:3]) for table in tables}, "the demo as it runs now"
    assert [made["cells_outside"](table, ranges) for table in tables] == [[]] * len(tables)
    assert all(tuple(table["columns"]) == COLUMNS for table in tables)
    table = made["demo_table"]()
    for page in (README, (DOCS / "tour.md").read_text()):
        assert table in page, "run: python docs/draw_results.py, and put its last table there"
    claim = runpy.run_path(str(DOCS / "draw_estimators.py"))["claim_table"]()
    stray = re.findall(r"\b0\.\d\d\b", README.replace(table, "").replace(claim, ""))
    assert stray == [], "numbers beside the tables are not checked: leave them to them"


def test_a_table_of_the_demo_outside_the_ranges_is_named_cell_by_cell() -> None:
    made = runpy.run_path(str(DOCS / "draw_results.py"))
    whole = json.loads((DOCS / "results" / "demo" / "aarch64-seed-0.json").read_text())
    ranges = made["demo_ranges"]([whole])
    model, score, *rest = whole["rows"][-1]
    worse = {**whole, "rows": [*whole["rows"][:-1], [model, {**score, "value": 0.5}, *rest]]}
    assert made["cells_outside"](worse, ranges) == [f"{model}, score, ambiguous: 0.500 is not in 0.94–0.98"]


def test_a_run_with_a_new_seed_is_compared_with_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = runpy.run_path(str(DOCS / "check_results.py"))
    recipe = load_recipe("withheld", ["seed=31", "train.steps=240", "eval.every=40", "train.advantage=dr-grpo"]).recipe
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))

    def write(ambiguous: float) -> None:
        lines = []
        for step in (1, 41, 81, 121, 161, 201, 240):
            kinds = {"ambiguous": ambiguous, "unambiguous": 0.88}
            line = {f"eval/by/opening={kind}/metric/verifier": right for kind, right in kinds.items()}
            line |= {f"eval/by/opening={kind}/reward": right - 0.025 for kind, right in kinds.items()}
            line |= {f"eval/by/opening={kind}/metric/asks": 1.0 for kind in kinds}
            trained = {} if step == 240 else {"reward/mean": 0.8}  # the last evaluation is of the model after step 240
            lines.append({"step": step, "eval/reward/mean": 0.8, "eval/metric/token_amount": 25.0, **line, **trained})
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(0.88)
    assert made["main"]([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "drgrpo tree, seed 31" in shown and shown.count("inside") == 4
    assert re.search(r"ambiguous at step 240 +0.88   0.8\d to 0.9\d   inside", shown)
    write(0.5)
    assert made["main"]([str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("OUTSIDE") == 2  # at the end and at worst, of one kind of opening
    made["main"](["--csv", str(tmp_path)])
    assert capsys.readouterr().out.startswith("drgrpo,tree,31,0,0.5000,0.8800,1.0000,1.0000,25.0000,0.4750,0.8550\n")


def test_the_pictures_of_the_concepts_are_current() -> None:
    made = runpy.run_path(str(DOCS / "draw_concepts.py"))
    for name in ("loop", "tree", "sizes"):
        assert (DOCS / f"{name}.svg").read_text() == made[f"draw_{name}"](), "run: python docs/draw_concepts.py"


def test_every_recipe_has_a_line() -> None:
    lines = PAGE[PAGE.index("## Every recipe") :]
    for recipe in RECIPES.glob("*.yaml"):
        stem = recipe.stem.removesuffix("-medium").removesuffix("-bigcodebench")
        assert f"`{stem}`" in lines, recipe.stem
