"""`data build --templates short`: user and judge receive the short prompts."""

from __future__ import annotations

from pathlib import Path

from upshot.cli import make_parser
from upshot.offline.arguments import build_simulation, open_task, task_metrics
from upshot.offline.data.build import settings_of
from upshot.rewards.metrics.judged import JudgeRating
from upshot.tasks.users.llm import LLMUser

GOALS = "tests/offline/data/samples/prompts.jsonl"


def test_short_templates_are_those_of_user_and_judge() -> None:
    task = open_task(GOALS, None)
    metrics = task_metrics("accuracy=1,interactivity=0.5", task)
    for short, ending in ((False, ""), (True, "_short")):
        services = build_simulation(task, {"p": "scripted:echo"}, "scripted:ok", "scripted:ok", metrics, short=short)
        assert isinstance(services.user, LLMUser) and services.user.template == f"user{ending}"
        rubrics = {name: m.rubric for name, m in services.metrics.items() if isinstance(m, JudgeRating)}
        assert rubrics == {name: f"{name}{ending}" for name in ("accuracy", "interactivity")}
        assert {name: how.weight for name, how in services.weights.items()} == metrics


def test_a_build_with_other_templates_is_a_different_build(tmp_path: Path) -> None:
    def identity(*words: str) -> dict[str, object]:
        given = ["data", "build", "--task", GOALS, "--out", str(tmp_path), "--policy", "scripted:echo", *words]
        args = make_parser(given[:1]).parse_args(given)
        return settings_of(args, open_task(GOALS, None), {})

    assert "templates" not in identity(), "builds from before can be resumed"
    assert identity("--templates", "short")["templates"] == "short"
