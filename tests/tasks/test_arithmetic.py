"""Generated word problems: right by construction, disjoint splits, a closed vocabulary, mistakes only where
intended."""

import random
from collections import Counter

from upshot.tasks.arithmetic import make_problem, problems, split_of_question
from upshot.tasks.gsm8k import Gsm8k
from upshot.tasks.verifiers.arithmetic import broken_steps, steps
from upshot.tasks.verifiers.gsm8k import Gsm8kVerifier as Verdict


def test_solutions_are_right_and_slips_are_found() -> None:
    rng = random.Random(0)
    for _ in range(300):
        problem = make_problem(rng)
        solution = problem.solution()
        assert Verdict().score(solution, str(problem.answer), {}).value == 1
        assert len(steps(solution)) == len(problem.steps)
        assert broken_steps(solution) == []
        assert len(broken_steps(problem.solution(slip=1))) == 1
        assert Verdict().score(problem.solution(marked=False), str(problem.answer), {}).value == 0


def test_the_difficulty_is_the_number_of_steps() -> None:
    assert {(len(p.steps), p.difficulty) for p in problems("train", 200)} == {(1, "1 step"), (2, "2 steps")}


def test_splits_are_disjoint_and_repeatable() -> None:
    found = {split: [p.question for p in problems(split, 200)] for split in ("train", "validation", "test")}
    assert all(split_of_question(question) == split for split, own in found.items() for question in own)
    assert found["train"] == [p.question for p in problems("train", 200)]
    assert all(len(set(own)) == 200 for own in found.values())


def test_every_word_in_use_is_in_the_vocabulary() -> None:
    task = Gsm8k(file="arithmetic", limit=400, tell=True)
    known = set(task.vocabulary())
    said = [m.content for dialogue in task.dialogues("train") for m in dialogue]
    said += [m.content for split in ("train", "test") for row in task.rows(split) for m in row.messages]
    assert {word for text in said for word in text.split()} <= known


def test_some_demonstrations_are_wrong_and_some_ignore_the_form() -> None:
    task = Gsm8k(file="arithmetic", limit=800)
    first = Counter(task.fault(dialogue[1].content) is None for dialogue in task.dialogues("train"))
    assert 0.2 < first[True] / first.total() < 0.4
    after = [task.fault(dialogue[3].content) is None for dialogue in task.dialogues("train") if len(dialogue) > 3]
    assert 0.3 < sum(after) / len(after) < 0.5


def test_real_gsm8k_needs_a_real_model() -> None:
    assert list(Gsm8k(file="x.jsonl").vocabulary()) == []
