"""Every Python and YAML block of the pages runs here or in a test that is named here, or it is listed with a reason.

The Python blocks of a page share one namespace, as if pasted into one session in order.
"""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import upshot
from tests.docs.pages import DOCS, PAGES, ROOT
from tests.models.misbehaving_server import MODEL, MisbehavingServer
from upshot.core.errors import UserError

FENCE = re.compile(r"^```(python|yaml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PASTED, EXAMPLES = "tests/docs/test_pasted.py", "tests/docs/test_agents.py"
ELSEWHERE = {
    ("README.md", "polite"): "tests/docs/test_commands.py::test_the_readmes_code_runs_as_pasted",
    ("agents.md", '"""An agent program'): f"{EXAMPLES}::test_the_example_runs_as_a_program_for_every_row",
    ("environments.md", '"""'): f"{EXAMPLES}::test_the_whole_file_and_its_recipe_are_the_examples",
    ("compare-and-sweep.md", ""): f"{PASTED}::test_the_python_of_tour_run_folder_and_sweep_runs",
    ("run-folder.md", ""): f"{PASTED}::test_the_python_of_tour_run_folder_and_sweep_runs",
    ("tour.md", ""): f"{PASTED}::test_the_python_of_tour_run_folder_and_sweep_runs",
    ("sft.md", ""): f"{PASTED}::test_the_plain_recipes_train_on_a_jsonl",
    ("own-data.md", ""): f"{PASTED}::test_recipes_for_the_users_own_files_train",
    ("from-trl.md", "# Upshot"): f"{PASTED}::test_recipes_for_the_users_own_files_train",
    ("from-trl.md", "upshot.train("): f"{PASTED}::test_recipes_for_the_users_own_files_train",
    (
        "own-task.md",
        "# kiosk.py",
    ): "tests/docs/test_own_task.py::test_the_whole_file_and_its_recipe_are_what_new_writes",
    ("own-task.md", "upshot.load"): "tests/docs/test_own_task.py::test_the_calls_from_python_run_as_pasted",
    ("own-task.md", "Trainer"): "tests/docs/test_own_task.py::test_the_loop_in_pieces_runs_as_pasted",
    ("users.md", "# porter.py"): "tests/docs/test_users.py::test_the_whole_file_trains_as_pasted_and_both_sides",
    **{
        (f"{name}.md", ""): "tests/docs/test_notebooks.py::test_a_notebook_runs_from_its_first_cell_to_its_last"
        for name in ("tutorials/task", "tutorials/collabllm", "tutorials/classmates")
    },
}
"""(page, text in the block) → the test that runs it."""
NOT_OURS = {("from-trl.md", "GRPOTrainer("): "TRL's code, shown beside ours; it needs TRL's own data and model"}
"""Blocks that no test runs, and the reason."""
OWN_MODULES = ("my_package.module", "agent", "stock", "reverse", "kiosk", "rewards", "porter")
BESIDE_IT = (*(f"'{name}:" for name in OWN_MODULES), "servers.yaml")
"""Names in YAML blocks that refer to a file of the reader's own."""


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    page: Path
    language: str
    code: str

    def is_among(self, places: Any) -> tuple[str, str] | None:
        """The (page, text) entry that names this block."""
        path = self.page.relative_to(ROOT).as_posix()
        return next(
            (key for key in places if path.endswith(f"/{key[0]}"[path == key[0] :]) and key[1] in self.code), None
        )

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.code.strip().splitlines()[0][:60]}"


BLOCKS = [Block(page, *match) for page in PAGES for match in FENCE.findall(page.read_text())]
PYTHON = [block for block in BLOCKS if block.language == "python"]
YAML = [block for block in BLOCKS if block.language == "yaml"]


def run_all(page: str, space: dict[str, Any], edits: dict[str, str], keep: str = "") -> dict[str, Any]:
    """Run the Python blocks of a page in one namespace, `await` included; every edit must match somewhere."""
    code = "\n".join(block.code for block in PYTHON if block.page == DOCS / page and keep in block.code)
    for old, new in edits.items():
        assert old in code, f"{page} no longer has {old!r}"
        code = code.replace(old, new)
    compiled = compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, space)
    if asyncio.iscoroutine(result):
        asyncio.run(result)
    return space


def run_api(place: Path) -> None:
    assert "step_of" not in run_all("api.md", {"__name__": "__main__"}, {})


def run_collabllm(place: Path) -> None:
    upshot.Trainer.tiny(["a"], max_tokens=4, shape={"hidden": 16, "layers": 1, "heads": 2}).save(place / "tiny")
    edits = {'"http://127.0.0.1:8000/v1#my-model"': '"scripted:echo"', '"path/to/tokenizer"': f'"{place / "tiny"}"'}
    space = run_all("collabllm.md", {}, {**edits, '"openai/gpt-4o-mini"': '"scripted:echo"'}, keep="upshot.reward(")
    assert len(space["replies"]) == 2


def run_engine(place: Path) -> None:
    from upshot.config.recipe import TrainConfig
    from upshot.training.learner.learner import Learner

    trainer = upshot.Trainer.tiny(["a", "b"], max_tokens=4, shape={"hidden": 16, "layers": 1, "heads": 2})
    module, tokenizer = trainer.engine.model, trainer.model.tokenizer
    space = {"module": module, "tokenizer": tokenizer, "Learner": Learner, "config": TrainConfig()}
    space["optimizer"] = __import__("torch").optim.SGD(module.parameters(), 0.1)
    exact = "engine = Engine(module, settings=EngineSettings(exact=True))"
    edits = {
        "[1, 5, 9], Sampling(max_tokens=64": "[1, 2, 3], Sampling(max_tokens=4",
        exact: exact.replace("(module", "(module, set()"),
    }
    assert run_all("engine.md", space, edits)["done"].ids


def run_models(place: Path) -> None:
    async def serve() -> None:
        async with MisbehavingServer(owned_by="test") as server:
            spec = {"url": server.url, "model": MODEL, "price_in": 0, "price_out": 0}
            edits = {'"http://127.0.0.1:8000/v1"': repr(spec)}
            await asyncio.to_thread(run_all, "models.md", {}, edits)
            assert server.outcomes["ok"] >= 1

    asyncio.run(serve())


def run_sandbox(place: Path) -> None:
    space = run_all("sandbox.md", {"program": "def f(x): return 2 * x"}, {'slots=8, require="namespaces"': "slots=1"})
    assert space["results"][0].value == 1.0


def run_tasks(place: Path) -> None:
    (place / "riddles.jsonl").write_text('{"question": "what is wet ?", "answer": "water"}\n' * 9)
    task = run_all("tasks.md", {}, {})["Riddles"](file=str(place / "riddles.jsonl"))
    assert task.rows("train")[0].reference == "water"


def run_from_verl(place: Path) -> None:
    score = run_all("tutorials/from-verl.md", {}, {})["compute_score"]
    opening = [{"role": "user", "content": "2 + 2 ?"}]
    right, wrong = upshot.reward(opening, ["4", "5"], reference="4", rounds=0, metrics={score: 1.0})
    assert (right.reward.total.value, wrong.reward.total.value) == (1.0, 0.0)


def run_reward_model(place: Path) -> None:
    run_all("howto/reward-model.md", {"__name__": "__main__"}, {})


HERE: dict[str, Callable[[Path], None]] = {
    "api.md": run_api,
    "collabllm.md": run_collabllm,
    "engine.md": run_engine,
    "models.md": run_models,
    "sandbox.md": run_sandbox,
    "tasks.md": run_tasks,
    "tutorials/from-verl.md": run_from_verl,
    "howto/reward-model.md": run_reward_model,
}
"""Pages whose Python runs here."""


@pytest.mark.parametrize("page", HERE)
def test_the_python_of_a_page_runs_as_pasted(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    HERE[page](tmp_path)


def test_every_python_block_is_run_by_a_test_or_listed_with_a_reason() -> None:
    here = {DOCS / page for page in HERE}
    unknown = [str(b) for b in PYTHON if b.page not in here and not b.is_among(ELSEWHERE) and not b.is_among(NOT_OURS)]
    assert unknown == [], "run it in HERE, name the test that runs it in ELSEWHERE, or give a reason in NOT_OURS"
    assert all(any(block.is_among([key]) for block in PYTHON) for key in (*ELSEWHERE, *NOT_OURS)), "of no block"
    assert len(NOT_OURS) <= 3


def test_the_tests_named_as_running_blocks_exist() -> None:
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), test


@pytest.mark.parametrize("block", YAML, ids=str)
def test_every_yaml_block_is_a_recipe_with_keys_names_and_options_that_exist(block: Block, tmp_path: Path) -> None:
    check_yaml(block.code, tmp_path)


def check_yaml(code: str, place: Path) -> None:
    """Resolve a recipe or a part of one and check its names, as a dry run does before it loads anything."""
    from upshot.rollout.check_names import check_names
    from upshot.serving.servers.file import ServersConfig

    piece = yaml.safe_load(code)
    if "servers" in piece:
        assert ServersConfig.model_validate(piece).servers
        return
    (place / "recipe.yaml").write_text(code if {"task", "extends"} & set(piece) else f"task: slots\n{code}")
    recipe = upshot.load(place / "recipe.yaml")
    try:
        check_names(recipe)
    except UserError as error:
        assert any(name in str(error) for name in BESIDE_IT), str(error)
