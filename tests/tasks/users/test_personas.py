"""Personas and vague users."""

from __future__ import annotations

import pytest

from tests.tasks.participants.speakers import chat, in_turn, says
from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.tasks.users.llm import LLMUser
from upshot.tasks.users.personas import PERSONAS, choose_persona


def test_mixed_personas_are_drawn_by_row_and_seed() -> None:
    rows = [Row(f"r{i}", ()) for i in range(60)]
    drawn = [choose_persona("mixed", row)[0] for row in rows]
    assert drawn == [choose_persona("mixed", row)[0] for row in rows]
    assert set(drawn) == set(PERSONAS)
    assert drawn != [choose_persona("mixed", row, seed=1)[0] for row in rows]


def test_all_futures_of_a_row_meet_the_same_person() -> None:
    user = LLMUser(in_turn(says("ok")), persona="mixed")
    root = chat("hi", "Hello.", goal="tea")
    prompts = {user.prompt(root.fork("reply", r).fork("future", f)) for r in range(4) for f in range(4)}
    assert len(prompts) == 1


def test_a_row_can_bring_its_own_persona() -> None:
    assert choose_persona("hurried", Row("r", (), meta={"persona": "expert"}))[0] == "expert"
    assert choose_persona("You are a bear.", Row("r", ())) == ("own", "You are a bear.")


def test_a_wrong_persona_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'hurried'"):
        LLMUser(in_turn(says("ok")), persona="huried")


def test_personas_and_vagueness_change_the_prompt() -> None:
    made = {
        LLMUser(in_turn(says("ok")), persona=persona, vagueness=vagueness).prompt(chat("hi", goal="tea"))
        for persona in PERSONAS
        for vagueness in ("low", "medium", "high")
    }
    assert len(made) == 3 * len(PERSONAS)


def test_the_short_template_for_weak_models_opens_and_continues() -> None:
    user = LLMUser(in_turn(says("ok")), template="user_short")
    opening = user.prompt(chat(goal="green tea"))
    assert "green tea" in opening and "opens the conversation" in opening
    later = user.prompt(chat("hi", "Hello.", goal="green tea"))
    assert later.startswith("You: hi\n\nAssistant: Hello.") and "opens the conversation" not in later
