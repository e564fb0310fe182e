"""Code that comes with a recipe, a run folder or a data row runs only where the user allowed it."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from upshot.cli import WITHOUT_CODE, main, make_parser
from upshot.config.load import load_recipe
from upshot.config.registry import Registry, path_of
from upshot.config.trust import SHIPPED, CodeNotTrusted, check_trust, trusting_only
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError
from upshot.rewards.advantages.grouped import estimators
from upshot.rewards.metric import metrics
from upshot.rollout.agents.runner import AgentConfig, AgentRunner
from upshot.rollout.services import assemble
from upshot.tasks.base import Task, tasks
from upshot.tasks.environments.mcp import McpEnvironment
from upshot.tasks.gsm8k import Gsm8k
from upshot.tasks.participants.base import users
from upshot.tasks.slots import SlotsTask

MODULE = "mine_untrusted"


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop(MODULE, None)


@pytest.fixture
def brought(tmp_path: Path) -> tuple[Path, Path]:
    """A recipe with code beside it, and the file that the code writes when it is imported."""
    trace, folder = tmp_path / "imported", tmp_path / "run"
    folder.mkdir()
    (folder / f"{MODULE}.py").write_text(
        f"open({str(trace)!r}, 'w').close()\ndef polite(conversation):\n    return 1.0\n"
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"extends: quickstart\nreward:\n  metrics: [verifier, '{MODULE}:polite']\n")
    return recipe, trace


@pytest.mark.parametrize(
    "verb",
    [
        ("chat", "{folder}"),
        ("rollout", "{recipe}"),
        ("eval", "{recipe}", "--goals", "1"),
        ("train", "{recipe}", "--dry-run", "--offline"),
        ("sweep", "{recipe}", "train.lr=[1e-3,1e-4]", "--dry-run"),
    ],
    ids=lambda words: words[0],
)
def test_other_verbs_than_train_refuse_the_code_of_a_recipe(
    verb: tuple[str, ...], brought: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    recipe, trace = brought
    monkeypatch.chdir(tmp_path)
    words = [word.format(recipe=recipe, folder=recipe.parent) for word in verb]
    assert main(words) == 2
    assert not trace.exists()
    if verb[0] != "chat":  # which first looks for the folder's model
        assert (
            f"metric '{MODULE}:polite' in reward.metrics is code that comes with the recipe" in capsys.readouterr().err
        )


def test_a_recipe_is_shown_and_compared_without_running_its_code(
    brought: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, trace = brought
    assert main(["recipe", "show", str(recipe), "--changed"]) == 0
    shown = capsys.readouterr()
    assert f"{MODULE}:polite" in shown.out and "names are not checked" in shown.err
    main(["recipe", "diff", str(recipe), "quickstart"])
    assert not trace.exists() and str(recipe.parent) not in sys.path
    assert main(["recipe", "show", str(recipe), "--trust"]) == 0
    assert trace.exists()


def test_code_that_the_command_line_names_is_the_users_own(
    brought: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, trace = brought
    monkeypatch.chdir(recipe.parent)
    assert main(["recipe", "show", "quickstart", f"reward.metrics=[{MODULE}:polite]"]) == 0
    assert trace.exists()


def test_in_python_the_callers_own_objects_need_no_permission() -> None:
    loaded = load_recipe("quickstart", {"reward": {"metrics": [lambda conversation: 1.0]}})
    assert loaded.recipe.reward.metrics[0].name.startswith("here:")


def test_every_verb_that_can_meet_such_code_takes_trust() -> None:
    for verb in ("train", "rollout", "chat", "eval", "replay", "export", "view", "runs", "score", "verify", "sweep"):
        assert verb not in WITHOUT_CODE
    assert make_parser(["chat"]).parse_args(["chat", "model", "--trust"]).trust
    assert make_parser(["recipe"]).parse_args(["recipe", "show", "quickstart", "--trust"]).trust


@pytest.mark.parametrize("registry", [tasks, users, metrics, estimators])
@pytest.mark.parametrize("path", ["os:system", "subprocess:Popen", "builtins:exec", "upshot.core.files:write_atomic"])
def test_an_object_of_the_wrong_kind_is_refused_before_it_is_called(registry: Registry[object], path: str) -> None:
    is_function = path.startswith("upshot") and registry.functions
    if is_function:
        return  # one of our functions: its caller checks what it takes
    with pytest.raises(UserError, match=r"standard library|it should be a subclass of"):
        registry.create(path, {"command": "true"})


def test_the_return_annotation_of_a_factory_says_what_it_makes() -> None:
    assert tasks.get(path_of(make_task)) is make_task
    with pytest.raises(UserError, match=r"is a function; it should be a subclass of upshot.tasks.base:Task"):
        tasks.get(path_of(make_anything))
    with pytest.raises(UserError, match=r"is the class Row; it should be a subclass of .*Metric or a Python function"):
        metrics.get(path_of(Row))


def make_task() -> Task:
    raise NotImplementedError


def make_anything(command: str = "") -> object:
    raise AssertionError("called")


def test_commands_in_a_recipe_are_refused_like_its_code() -> None:
    with trusting_only(["chat", "run"]):
        with pytest.raises(CodeNotTrusted, match=r"MCP server 'touch x' in task.server"):
            McpEnvironment("touch x", False, "user", 5.0)
        with pytest.raises(CodeNotTrusted, match=r"agent 'true --now' in episode.agent"):
            AgentRunner(AgentConfig(program="true --now"), None)
        with pytest.raises(CodeNotTrusted, match="a sandbox that isolates nothing 'subprocess'"):
            assemble(SlotsTask(rows_per_split=8), {}, {}, sandbox="subprocess")
        check_trust("run", "agent")  # the user typed it
    check_trust("touch x", "MCP server")


def test_a_data_row_cannot_name_code() -> None:
    task = Gsm8k(file="arithmetic", limit=4)
    row = Row("r", (Message("user", "1+1?"),), reference="2", source="shutil:rmtree")
    conversation = Conversation(row)
    conversation.say(Message("assistant", "2"))
    with pytest.raises(UserError, match="row 'r' names code as its source"):
        asyncio.run(task.verify(conversation))


def test_only_code_that_shipped_recipes_name_counts_as_ours() -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    text = "\n".join(path.read_text() for path in recipes.rglob("*.yaml"))
    assert set(re.findall(r"\bupshot(?:\.\w+)+:\w+", text)) == SHIPPED
    with trusting_only([]):
        for path in SHIPPED:
            check_trust(path, "metric")
        with pytest.raises(CodeNotTrusted):
            check_trust("upshot.core.files:write_text", "metric")
