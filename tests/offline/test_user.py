"""`upshot eval user` and `data prepare --for user`: real transcripts, compared with and learned from."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tasks.participants.speakers import chat, in_turn
from upshot.cli import main
from upshot.core.conversation import Message
from upshot.models.base import ModelCallError, Request
from upshot.models.scripted import SCRIPTS
from upshot.tasks.datasets.records import read_dialogues
from upshot.tasks.users.noise import mistype
from upshot.tasks.users.plain import END_MARK, PlainUser
from upshot.tasks.users.transcripts import transcript_of

THINGS = ["lamp", "chair", "table", "bowl", "coat", "rug", "vase", "clock", "mirror", "shelf", "hat", "bag"]


def transcript(number: int) -> dict[str, Any]:
    """A terse person who asks one thing after another and then just leaves."""
    thing, other = THINGS[number % 12], THINGS[(number + 5) % 12]
    said = [f"need a {thing}", "Which colour would you like?", f"red. got a {other} too?", "Yes, we do.", "ok", "Fine."]
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)], "goal": f"a {thing}"}


def file_of(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def people(tmp_path: Path) -> str:
    return file_of(tmp_path / "people.jsonl", *[transcript(number) for number in range(12)])


def terse(request: Request) -> str:
    """Like the people in the transcripts, as far as the prompt shows them."""
    shown = [message.content for message in request.prompt]  # type: ignore[union-attr]
    thing = shown[0].split()[-1]
    other = THINGS[(THINGS.index(thing) + 5) % 12]
    answers = [f"need a {thing}", f"red. got a {other} too?", "ok", END_MARK]
    return answers[sum(message.role == "user" for message in request.prompt)]  # type: ignore[union-attr]


def gushing(request: Request) -> str:
    """As an assistant would play a person."""
    return "Thank you so much! I would be happy to help. Please let me know if you have any further questions."


def evaluate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["eval", "user", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_lifelike_user_is_indistinguishable_and_an_assistant_in_disguise_is_not(
    people: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SCRIPTS, "terse", terse)
    monkeypatch.setitem(SCRIPTS, "gushing", gushing)
    same = evaluate(capsys, people, "--user", "scripted:terse", "--out", str(tmp_path / "a.jsonl"))
    assert same["transcripts"] == 12 and same["missing"] == 0
    assert same["told_apart"]["value"] == 0.5 and same["words"]["difference"]["value"] == 0
    assert same["leaving"]["where_they_left"]["value"] == 1 and same["leaving"]["too_early"]["value"] == 0
    assert same["information"]["real"]["value"] > 0.3 and same["initiative"]["user"]["value"] == pytest.approx(1 / 3)
    other = evaluate(capsys, people, "--user", "scripted:gushing", "--out", str(tmp_path / "b.jsonl"))
    assert other["told_apart"]["value"] > 0.95 and other["role_flips"]["value"] == 1
    longer = other["words"]["difference"]
    assert longer["low"] > 10 and longer["p"] < 0.01
    assert other["leaving"]["where_they_left"]["value"] == 0
    assert main(["eval", "user", people, "--user", "scripted:gushing", "--out", str(tmp_path / "b.jsonl")]) == 0
    assert "identified by a classifier (chance: 0.5)" in capsys.readouterr().out


def test_a_failed_turn_costs_its_transcript_and_is_retried(
    people: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def sometimes(request: Request) -> str:
        asked.append(request.prompt[0].content)  # type: ignore[union-attr]
        if "a lamp" in asked[-1]:
            raise ModelCallError("refused", "no lamps")
        return terse(request)

    monkeypatch.setitem(SCRIPTS, "sometimes", sometimes)
    found = evaluate(capsys, people, "--user", "scripted:sometimes")
    assert (found["transcripts"], found["missing"]) == (11, 1)
    asked.clear()
    assert evaluate(capsys, people, "--user", "scripted:sometimes")["missing"] == 1
    assert asked and all("a lamp" in shown for shown in asked)


def test_personas_and_noise_are_options_and_results_are_split_by_persona(
    people: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def person(request: Request) -> str:
        hurried = "between two meetings" in request.prompt[0].content  # type: ignore[union-attr]
        return "yes" if hurried else "yes that would be very nice of you indeed"

    monkeypatch.setitem(SCRIPTS, "person", person)
    found = evaluate(capsys, people, "--user", "scripted:person", "--with", "{persona: [hurried, plain], noise: 0.2}")
    assert set(found["personas"]) == {"hurried", "plain"}
    assert found["personas"]["hurried"]["words"]["value"] == 1 < found["personas"]["plain"]["words"]["value"]


@given(st.text(max_size=60), st.floats(0, 1), st.integers())
def test_noise_changes_only_words_and_at_the_given_rate(text: str, share: float, seed: int) -> None:
    noisy = mistype(text, share, random.Random(seed))
    assert mistype(text, share, random.Random(seed)) == noisy and mistype(text, 0, random.Random(seed)) == text
    for before, after in zip(text.split(" "), noisy.split(" "), strict=True):
        assert before == after or before.isalpha()


def test_the_noise_of_a_user_depends_only_on_its_conversation() -> None:
    said = []
    for _ in range(2):
        user = PlainUser(in_turn("please bring me another chair tomorrow"), noise=0.9)
        talk = chat("hello", "yes?")
        said.append(asyncio.run(user.observe(talk)).messages[0].content)
    assert said[0] == said[1] != "please bring me another chair tomorrow"


def test_transcripts_become_dialogues_from_the_users_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes?"}]}
    shared["conversations"] += [{"from": "human", "value": "thanks"}]
    bad = [{"messages": [{"role": "user", "content": "alone"}]}, {"text": "none"}]
    file = file_of(tmp_path / "chats.jsonl", transcript(1), shared, *bad)
    out = tmp_path / "data"
    assert main(["data", "prepare", "--dataset", file, "--for", "user", "--out", str(out), "--validation", "0"]) == 0
    assert "no turn of a user and of an assistant" in capsys.readouterr().out
    first, second = read_dialogues(str(out / "user_train.parquet"))
    assert first[0].role == "system" and first[0].content.endswith("a chair")
    assert [message.role for message in first[1:]] == ["assistant", "user"] * 3 + ["assistant"]
    assert first[-1] == Message("assistant", END_MARK) and second[-1].content == f"thanks {END_MARK}"
    assert pyarrow.parquet.read_table(out / "user_train.parquet").num_rows == 2


def test_turns_of_one_speaker_are_merged_and_those_before_the_user_are_dropped() -> None:
    said = [("assistant", "Welcome!"), ("user", "hi"), ("user", "a lamp"), ("tool", "x"), ("assistant", "yes?")]
    found = transcript_of({"messages": [{"role": role, "content": text} for role, text in said]})
    assert [message.content for message in found.messages] == ["hi\na lamp", "yes?"]
    assert found.goal == "hi\na lamp" and not found.told
