"""Tool calls: taken from the backend or the text, answered in tool messages; mistakes are reported back, never
raised."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError
from upshot.tasks.base import tasks
from upshot.tasks.participants.base import Observation
from upshot.tasks.participants.search import Corpus, Passage, load_corpus
from upshot.tasks.participants.tools import Calculator, Python, Search, ToolEnvironment, calls_of


def call(name: str, arguments: Any, identity: str = "c1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def observe(environment: ToolEnvironment, message: Message) -> Observation:
    conversation = Conversation(Row("r", (Message("user", "?"),)))
    conversation.say(message)
    return asyncio.run(environment.observe(conversation))


CORPUS = Corpus(
    [Passage("Moon", "The moon orbits the earth."), Passage("Sun", "The sun is a star."), Passage("", "Cats")]
)


def test_calls_are_answered_in_tool_messages_with_their_ids() -> None:
    environment = ToolEnvironment([Calculator(), Search(CORPUS, 1)])
    message = Message(
        "assistant",
        "",
        tool_calls=(call("calculator", {"expression": "(3+4)*12"}, "a"), call("search", {"query": "star"}, "b")),
    )
    seen = observe(environment, message)
    assert [(m.role, m.tool_call_id, m.name) for m in seen.messages] == [
        ("tool", "a", "calculator"),
        ("tool", "b", "search"),
    ]
    assert seen.messages[0].content == "84"
    assert "The sun is a star." in seen.messages[1].content
    assert seen.metrics == {"tool_calls": 2, "tool_errors": 0}


def test_calls_in_the_text_are_found() -> None:
    text = 'Let me see. <tool_call>\n{"name": "calculator", "arguments": {"expression": "1/3"}}\n</tool_call>'
    seen = observe(ToolEnvironment([Calculator()]), Message("assistant", text))
    assert seen.messages[0].content == "1/3"
    as_user = observe(ToolEnvironment([Calculator()], role="user"), Message("assistant", text))
    assert as_user.messages[0] == Message("user", "[calculator] 1/3")


def test_a_turn_without_a_call_ends_the_episode() -> None:
    assert observe(ToolEnvironment([Calculator()]), Message("assistant", "It is 4.")).done


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (call("calculater", {"expression": "1"}), "did you mean 'calculator'"),
        (call("calculator", {"expr": "1"}), "needs the argument 'expression'"),
        (call("calculator", {"expression": "9**9**9"}), "not an expression"),
        (call("calculator", [1]), "not an object"),
        ({"id": "x", "function": {"name": "calculator", "arguments": "{"}}, "not JSON"),
    ],
)
def test_a_wrong_call_is_answered_with_the_mistake(made: dict[str, Any], told: str) -> None:
    seen = observe(ToolEnvironment([Calculator()]), Message("assistant", "", tool_calls=(made,)))
    assert told in seen.messages[0].content
    assert seen.metrics["tool_errors"] == 1


def test_too_many_calls_are_refused_one_by_one() -> None:
    made = tuple(call("calculator", {"expression": str(n)}, str(n)) for n in range(12))
    seen = observe(ToolEnvironment([Calculator()]), Message("assistant", "", tool_calls=made))
    assert len(seen.messages) == 12
    assert seen.metrics["tool_errors"] == 4


class Runner:
    """Stands in for the sandbox."""

    def __init__(self, **result: Any) -> None:
        defaults = {"outcome": "passed", "stdout": "", "stderr": "", "detail": ""}
        self.result = SimpleNamespace(**{**defaults, **result})

    async def run(self, code: str, limits: Any = None) -> Any:
        return self.result


def test_the_python_tool_shows_output_errors_and_how_it_ended() -> None:
    def answer(**result: Any) -> str:
        message = Message("assistant", "", tool_calls=(call("python", {"code": "…"}),))
        return observe(ToolEnvironment([Python(Runner(**result))]), message).messages[0].content

    assert answer(stdout="42\n") == "42"
    assert answer() == "(no output)"
    assert "[timeout]" in answer(outcome="timeout")
    assert "ZeroDivisionError" in answer(outcome="error", stderr="ZeroDivisionError")
    assert answer(stdout="x" * 9000).endswith("… (cut)")
    with pytest.raises(RuntimeError, match="sandbox_fault"):
        answer(outcome="sandbox_fault", detail="gone")


@given(st.text(max_size=200))
def test_any_text_is_handled(text: str) -> None:
    calls_of(Message("assistant", text))
    calls_of(Message("assistant", f"<tool_call>{{{text}}}</tool_call>"))


def test_search_finds_the_best_passage_first() -> None:
    assert [p.title for p in CORPUS.search("does the moon orbit the earth", 2)] == ["Moon"]
    assert CORPUS.search("zebra") == []


def test_a_corpus_is_jsonl_or_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "T", "text": "one"}\n{"contents": "two"}\n')
    (tmp_path / "b.txt").write_text("one\n\ntwo\nlines\n\n\nthree")
    assert len(load_corpus(str(tmp_path / "a.jsonl")).passages) == 2
    assert [p.text for p in load_corpus(str(tmp_path / "b.txt")).passages] == ["one", "two\nlines", "three"]
    (tmp_path / "c.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match="line 1"):
        load_corpus(str(tmp_path / "c.jsonl"))


def test_search_qa_plays_from_search_to_answer(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"title": "Sun", "text": "The sun is a star."}\n')
    (tmp_path / "qa.jsonl").write_text('{"question": "What is the sun?", "answer": ["a star", "star"]}\n')
    task = tasks.create(
        "search-qa", {"corpus": str(tmp_path / "corpus.jsonl"), "file": str(tmp_path / "qa.jsonl"), "held_out": 0}
    )
    conversation = Conversation(task.rows("train")[0])
    environment = task.environment()
    assert environment is not None
    conversation.say(Message("assistant", "", tool_calls=(call("search", {"query": "sun"}),)))
    seen = asyncio.run(environment.observe(conversation))
    conversation.say(seen.messages[0])
    conversation.say(Message("assistant", "<answer>A star</answer>"))
    assert asyncio.run(environment.observe(conversation)).done
    assert asyncio.run(task.verify(conversation)).value == 1
    assert task.tools()[0]["function"]["name"] == "search"


def test_tools_can_be_described_in_the_system_prompt(tmp_path: Path) -> None:
    (tmp_path / "qa.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    options = {"file": str(tmp_path / "qa.jsonl"), "held_out": 0, "tools": ["calculator"], "describe": True}
    system = tasks.create("tools", options).rows("train")[0].messages[0]
    assert system.role == "system"
    assert "<tool_call>" in system.content
    assert '"calculator"' in system.content


def test_a_search_accepts_any_text() -> None:
    corpus = Corpus([Passage("", 'snake_case OR "quotes" AND brackets)'), Passage("", "nothing of that")])
    for query in ('"snake_case"', "OR", "brackets) NEAR(", "quotes*", "lone \ud83d snake_case"):
        assert [p.text[:5] for p in corpus.search(query, 1)] == (["snake"] if query != "OR" else []), query
    assert corpus.search("the of and") == corpus.search("") == []
