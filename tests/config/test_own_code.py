"""The user's own code: found where they keep it, and a plain function is enough."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from upshot.cli import main
from upshot.config.load import load_recipe
from upshot.config.registry import path_of
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.core.time_limit import call_seconds
from upshot.rewards.build import build_metric, check_metric
from upshot.rewards.metric import Metric, score_by
from upshot.rollout.episode import _observe
from upshot.tasks.base import Task, tasks
from upshot.tasks.participants.base import Observation, Participant

TINY = (
    *("model.tiny={hidden: 16, layers: 1, heads: 2, mlp: 32}", "task.rows_per_split=32", "futures.samples=2"),
    *("warm_start.steps=1", "warm_start.batch=4", "train.steps=1", "train.prompts_per_step=2", "train.group_size=2"),
)


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins with Python's own path and leaves none of its modules behind."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("mine"):
            del sys.modules[name]


def talk(*said: str) -> Conversation:
    conversation = Conversation(Row("r", (Message("user", "hello"),)))
    for text in said:
        conversation.say(Message("assistant", text))
    return conversation


def polite(conversation: Conversation, word: str = "please", weight: float = 1.0) -> float:
    return weight * (word in conversation.messages[-1].content)


async def waits(conversation: Conversation) -> bool:
    await asyncio.sleep(0)
    return len(conversation.messages) > 1


def silent(conversation: Conversation) -> None:
    return None


def broken(conversation: Conversation) -> float:
    raise ValueError("no such word")


def slow(conversation: Conversation) -> float:
    time.sleep(5)
    return 1.0


def nothing() -> float:
    return 1.0


def score(metric: Metric, conversation: Conversation) -> Score:
    return asyncio.run(score_by(metric, conversation, "own"))


def test_a_plain_function_is_a_metric_with_options_of_its_own() -> None:
    assert score(build_metric(path_of(polite)), talk("please wait")).value == 1.0
    metric = build_metric(path_of(polite), {"word": "thanks", "weight": "2"})
    assert score(metric, talk("thanks")).value == 2.0
    with pytest.raises(UserError, match=r"unknown option 'wrod' of metric .*; did you mean 'word'\?"):
        check_metric(path_of(polite), {"wrod": "thanks"})
    with pytest.raises(UserError, match="takes no argument; a metric is a function of the conversation"):
        check_metric(path_of(nothing))


def test_a_function_may_wait_and_may_return_a_bool_or_none() -> None:
    assert score(build_metric(path_of(waits)), talk("hi")).value == 1.0
    absent = score(build_metric(path_of(silent)), talk("hi"))
    assert (absent.reason, "returned None" in absent.why) == (Reason.NOT_SCORED, True)
    assert "ValueError: no such word" in score(build_metric(path_of(broken)), talk("hi")).why


def test_a_function_that_never_returns_gives_a_missing_score_after_its_time_limit() -> None:
    token = call_seconds.set(0.2)
    try:
        late = score(build_metric(path_of(slow)), talk("hi"))
    finally:
        call_seconds.reset(token)
    assert (late.reason, late.why) == (Reason.TIMEOUT, "own: slow took more than 0.2 s (call_seconds)")


def test_an_object_without_an_import_path_is_found_in_this_process_only() -> None:
    name = path_of(lambda conversation: 0.25)
    assert name == path_of(build_metric(name).function)  # type: ignore[attr-defined]
    assert score(build_metric(name), talk("hi")).value == 0.25
    with pytest.raises(UserError, match="exists only in another process; put it in a file"):
        build_metric("here:gone")


def write_own(folder: Path, module: str) -> Path:
    (folder / module).mkdir(parents=True)
    (folder / module / "rewards.py").write_text("def polite(conversation):\n    return 1.0\n")
    recipe = folder / "my.yaml"
    recipe.write_text(
        f"extends: quickstart\nreward:\n  metrics: [{{name: verifier}}, {{name: {module}.rewards:polite}}]\n"
    )
    return recipe


def test_code_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_own(tmp_path, "mine_here")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", "--dry-run", "reward.metrics=[mine_here.rewards:polite]"]) == 0


def test_code_beside_the_recipe_is_found_and_found_again_by_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_own(tmp_path / "project", "mine_beside")
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(recipe), *TINY, "run_dir=run", "--quiet"]) == 0
    sys.path.remove(str(recipe.parent))
    for name in [name for name in sys.modules if name.startswith("mine")]:
        del sys.modules[name]
    assert main(["train", "--resume", "run", "train.steps=2", "--quiet"]) == 0


def test_own_code_does_not_shadow_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "upshot_score_twin.py").write_text("")
    (tmp_path / "mypy_extensions.py").write_text("polite = None\n")  # the name of an installed package
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="module 'mypy_extensions' has no 'polite'"):
        check_metric("mypy_extensions:polite")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def polite(:\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import no_such_library\n", "its module needs 'no_such_library'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        check_metric("mine_broken:polite")


def test_a_missing_module_says_where_it_was_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"searched {tmp_path}, the recipe.s folder"):
        check_metric("mine_nowhere:polite")


def test_functions_and_classes_can_be_passed_to_a_recipe_directly() -> None:
    recipe = load_recipe("quickstart", {"reward": {"metrics": ["verifier", polite]}, "train.steps": 3}).recipe
    assert recipe.reward.metrics[1].name.endswith("test_own_code:polite")
    assert (recipe.train.steps, recipe.train.lr) == (3, 4e-4)


class Rows(Task):
    """A task whose rows each test replaces."""

    name = "rows"
    returns: Any = None

    def rows(self, split: str) -> Any:
        return self.returns(split)


def rows_by(monkeypatch: pytest.MonkeyPatch, returns: Callable[[str], Any]) -> Sequence[Row]:
    monkeypatch.setattr(Rows, "returns", staticmethod(returns))
    return tasks.create(path_of(Rows)).rows("train")


def test_rows_may_come_from_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("r", (Message("user", "hello"),))
    assert rows_by(monkeypatch, lambda split: (row for _ in range(2))) == [row, row]
    assert rows_by(monkeypatch, lambda split: None) == []


def breaks(split: str) -> Any:
    raise ValueError("no file")


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (breaks, r"rows\('train'\) of task .*:Rows' raised ValueError: no file \(test_own_code\.py, line"),
        (lambda split: sys.exit(3), r"raised SystemExit: 3 \(test_own_code\.py, line"),
        (lambda split: [{"id": "r"}], r"should be Row objects with Message objects, not {'id': 'r'}"),
        (lambda split: [Row("r", [{"role": "user"}])], r"with Message objects, not Row\(id='r'"),  # type: ignore[arg-type]
    ],
)
def test_values_that_are_not_rows_are_refused_in_one_line(
    returns: Callable[[str], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=message):
        rows_by(monkeypatch, returns)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (breaks, r"dialogues\('train'\) of task .*:Rows' raised ValueError: no file \(test_own_code\.py, line"),
        (lambda split: ["hello"], r"should be tuples of Message objects, not 'hello'"),
        (lambda split: [(Message("user", "hi"), Message("assistant", 3))], r"not Message\(role='assistant', content=3"),  # type: ignore[arg-type]
    ],
)
def test_dialogues_that_are_none_are_refused_in_one_line(
    returns: Callable[[str], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rows, "dialogues", lambda self, split: returns(split), raising=False)
    with pytest.raises(UserError, match=message):
        tasks.create(path_of(Rows), {}, "task").dialogues("train")


class Unready(Metric):
    def __init__(self) -> None:
        raise ValueError("no rubric")

    async def score(self, conversation: Conversation) -> Score:
        raise NotImplementedError


class Unfinished(Metric):
    pass


def test_a_class_that_cannot_be_constructed_is_one_line() -> None:
    with pytest.raises(UserError, match=r"Unready' raised ValueError: no rubric \(test_own_code\.py, line"):
        build_metric(path_of(Unready))
    with pytest.raises(UserError, match="Unfinished' does not define score"):
        build_metric(path_of(Unfinished))


def test_a_module_that_exits_while_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_script.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(UserError, match="cannot import metric 'mine_script:polite': SystemExit: 2"):
        build_metric("mine_script:polite")


class Talker(Participant):
    async def observe(self, conversation: Conversation) -> Observation:
        return "hello"  # type: ignore[return-value]


def test_an_answer_that_is_not_an_observation_is_reported() -> None:
    with pytest.raises(TypeError, match=r"Talker\.observe should return an Observation, not 'hello' \(str\)"):
        asyncio.run(_observe(Talker(), talk("hi")))
