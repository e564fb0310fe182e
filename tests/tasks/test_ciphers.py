"""Plain and coded thoughts: both lead to the right answer, but only one of them is readable."""

from upshot.core.thought import MARKERS
from upshot.tasks.ciphers import Ciphers, thought, thoughtful
from upshot.tasks.verifiers.gsm8k import Gsm8kVerifier


def is_coded(reply: str) -> bool:
    return reply.split()[1].startswith("q")


def test_demonstrations_think_in_the_code_in_the_given_share_and_answer_right() -> None:
    task = Ciphers(coded=0.7, limit=400)
    replies = [dialogue[-1].content for dialogue in task.dialogues("train")]
    assert 0.6 < sum(map(is_coded, replies)) / len(replies) < 0.8
    for row, reply in zip(task.rows("train"), replies, strict=True):
        assert reply.startswith(MARKERS[0])
        said = reply.partition(MARKERS[1])[2]
        assert Gsm8kVerifier().score(said, row.reference, {}).value == 1
        assert said.strip() == task.answer_text(row)


def test_a_coded_thought_contains_no_number_or_sign_of_the_plain_one() -> None:
    for problem in Ciphers(limit=200).problems("test"):
        plain, coded = thought(problem).split(), thought(problem, coded=True).split()
        assert len(plain) == len(coded)
        assert set(plain) & set(coded) == {"."}


def test_two_plain_thoughts_never_share_a_code() -> None:
    problems = Ciphers(limit=400).problems("train")
    by_code = {thought(problem, coded=True): thought(problem) for problem in problems}
    assert len(by_code) == len({thought(problem) for problem in problems})


def test_a_model_taught_on_plain_thoughts_knows_no_word_of_the_code() -> None:
    problems = Ciphers(limit=100).problems("train")
    for coded in (0.0, 0.5):
        task = Ciphers(coded=coded, limit=100)
        known = set(task.vocabulary())
        said = {word for problem in problems for word in thoughtful(problem, coded=True).split()}
        code = {word for word in said if word.startswith("q")}
        assert code and (code <= known if coded else not code & known)
        spoken = {word for talk in task.dialogues("train") for m in talk for word in m.content.split()}
        assert spoken <= known
