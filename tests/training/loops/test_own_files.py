"""Examples that teach nothing, and evaluations of nothing, are reported or refused before a run begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_parts
from tests.training.workshop import recipe
from upshot.config.method import method_of
from upshot.config.recipe import Recipe
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.run.checks import data, prompts
from upshot.run.checks.context import CheckContext, Finding
from upshot.run.forecast import count_examples
from upshot.tasks.base import tasks
from upshot.training.loops.phase import fit_examples
from upshot.training.loops.sft import Dialogues

ASKED = {"role": "user", "content": "i want a lamp"}
REPLY = {"role": "assistant", "content": "which size ?"}
TALK = {"messages": [ASKED, REPLY]}
SILENT = {"messages": [ASKED]}
LATE = {"messages": [{"role": "user", "content": "i want a lamp " * 60}, REPLY]}
PAIR = {"prompt": "hi", "chosen": "a", "rejected": "b"}
MARKED = {"prompt": "hi", "completion": "a", "label": True}


def run_on(folder: Path, method: str, *rows: dict[str, Any], held_out: tuple[dict[str, Any], ...] = ()) -> Recipe:
    """A run of a method on rows, evaluated on other rows if there are any."""
    for name, some in (("train", rows), ("eval", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    evaluation = {"every": 1, "data": str(folder / "eval.jsonl")} if held_out else {"every": 0}
    more = {"eval": evaluation}
    return recipe(folder / "run", warm=False, method=method, data=str(folder / "train.jsonl"), steps=1, more=more)


def found(recipe: Recipe) -> list[Finding]:
    return list(data.check(CheckContext(recipe, offline=True)))


def test_dialogues_without_an_assistant_turn_are_counted_and_skipped(tmp_path: Path) -> None:
    run = run_on(tmp_path, "sft", TALK, SILENT, TALK, SILENT)
    assert found(run) == [Finding("2 of 4 dialogues have no assistant turn and are left out", fatal=False)]
    assert count_examples(run, tasks.create("slots", {}, "task")) == 2


def test_dialogues_with_an_empty_assistant_turn_are_told(tmp_path: Path) -> None:
    empty = {"messages": [*SILENT["messages"], {"role": "assistant", "content": " "}]}
    says = "1 of 2 dialogues have an empty assistant turn; the model learns to say nothing there"
    assert found(run_on(tmp_path, "sft", TALK, empty)) == [Finding(says, fatal=False)]


def test_an_evaluation_without_an_assistant_turn_is_refused_before_the_run(tmp_path: Path) -> None:
    (finding,) = found(run_on(tmp_path, "sft", TALK, held_out=(SILENT,)))
    assert finding.fatal and "eval.jsonl' has nothing to evaluate; set eval.data or eval.every=0" in finding.says


@pytest.mark.parametrize(("method", "row"), [("sft", TALK), ("dpo", PAIR), ("kto", MARKED)])
def test_an_evaluation_file_is_read_before_the_run_and_its_faults_are_reported_once(
    method: str, row: dict[str, Any], tmp_path: Path
) -> None:
    run = run_on(tmp_path, method, row, held_out=({"nothing": 1},))
    with pytest.raises(UserError, match=r"eval.data '.*', row 1 has no "):
        found(run)
    Path(str(run.eval.data)).unlink()
    with pytest.raises(UserError, match=r"eval.data: there is no file"):
        found(run)


def test_pairs_of_one_reply_and_pairs_that_contradict_each_other_are_counted(tmp_path: Path) -> None:
    same, opposite = {**PAIR, "rejected": "a"}, {**PAIR, "chosen": "b", "rejected": "a"}
    says = [finding.says for finding in found(run_on(tmp_path, "dpo", PAIR, same, opposite, {**PAIR, "prompt": "bye"}))]
    assert says == [
        "1 of 4 pairs have the same reply as chosen and rejected: nothing is learned from them",
        "2 of 4 pairs contradict another pair, which prefers the other reply",
    ]
    with pytest.raises(UserError, match="chosen and rejected are the same in all 2 pairs"):
        found(run_on(tmp_path, "dpo", same, same))


@pytest.mark.parametrize(("label", "word"), [(True, "good"), (False, "bad")])
def test_replies_that_are_all_marked_alike_are_reported(label: bool, word: str, tmp_path: Path) -> None:
    (finding,) = found(run_on(tmp_path, "kto", {**MARKED, "label": label}, {**MARKED, "label": label}))
    assert not finding.fatal and finding.says.startswith(f"all replies are marked {word}")
    assert not found(run_on(tmp_path, "kto", MARKED, {**MARKED, "label": False}))


def test_dialogues_whose_replies_lie_beyond_the_context_are_left_out() -> None:
    renderer = Renderer(tiny_parts()[1])
    talks = [[Message(**message) for message in row["messages"]] for row in (TALK, LATE, SILENT)]
    assert len(Dialogues(talks, renderer, 64)) == 1
    assert len(Dialogues(talks, renderer, 0)) == 2, "without a limit nothing is cut"
    assert all(any(datum.mask) for datum in Dialogues(talks, renderer, 64))


def test_too_long_dialogues_are_reported_before_the_run_and_refused_if_none_is_left(tmp_path: Path) -> None:
    for rows, fatal in (((TALK, LATE), False), ((LATE,), True)):
        run = run_on(tmp_path, "sft", *rows)
        run = run.model_copy(update={"model": run.model.model_copy(update={"max_context": 64})})
        (finding,) = prompts.check(CheckContext(run, offline=True))
        assert "1 of them, whose assistant speaks only after that, are left out" in finding.says
        assert finding.fatal is fatal


def test_nothing_to_evaluate_in_the_context_stops_a_run_before_its_first_step(tmp_path: Path) -> None:
    from types import SimpleNamespace

    run = run_on(tmp_path, "sft", TALK, held_out=(LATE,))
    said: list[str] = []
    policy = SimpleNamespace(renderer=Renderer(tiny_parts()[1]), max_context=64)
    loop: Any = SimpleNamespace(policy=policy, say=said.append)
    examples = method_of("sft").held_out_examples(run, tasks.create("slots", {}, "task"))
    assert examples is not None
    with pytest.raises(UserError, match="nothing to evaluate"):
        fit_examples(loop, examples, Dialogues, "held-out", method_of("sft").explain_empty_evaluation(run))
    assert said == ["1 of 1 held-out examples are left out: too long for the context"]
