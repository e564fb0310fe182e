"""The simulated user played by a language model."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tasks.participants.speakers import chat, in_turn, says, speaker
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError
from upshot.models.base import Completion, ModelCallError, Request
from upshot.tasks.participants.base import users
from upshot.tasks.users.llm import END_SIGNAL, LLMUser

GOAL = "Find the smallest prime that divides one hundred and forty three and explain to me why that is so"


def observe(user: LLMUser, conversation: Conversation):
    """One turn of the user."""
    return asyncio.run(user.observe(conversation))


def test_the_prompt_shows_task_goal_history_and_end_signal_but_no_system_prompt() -> None:
    user = LLMUser(in_turn(says("ok")), task_description="solving puzzles")
    conversation = Conversation(Row("r", (Message("system", "SECRET SYSTEM"), Message("user", "hi there")), goal=GOAL))
    conversation.say(Message("assistant", "Hello!"))
    prompt = user.prompt(conversation)
    for part in ("solving puzzles", GOAL, "You: hi there", "Assistant: Hello!", END_SIGNAL):
        assert part in prompt
    assert "SECRET SYSTEM" not in prompt


def test_the_rows_own_task_description_comes_first() -> None:
    user = LLMUser(in_turn(says("ok")), task_description="solving puzzles")
    prompt = user.prompt(chat("hi", goal=GOAL, task_desc="cooking soup"))
    assert "cooking soup" in prompt and "solving puzzles" not in prompt


def test_the_tasks_description_is_used_if_none_is_given() -> None:
    task = SimpleNamespace(description="cooking soup")
    made = users.create("llm", {}, "futures.user", models={"user": in_turn(says("ok"))}, task=task)
    assert "cooking soup" in made.prompt(chat("hi", goal=GOAL))


def test_thought_and_answer_are_noted_and_never_said() -> None:
    user = LLMUser(in_turn(says("And then?", "seven", "not sure about this")))
    seen = observe(user, chat("hi", "It is 7.", goal=GOAL))
    assert [m.content for m in seen.messages] == ["And then?"]
    assert seen.note["thought"] == "not sure about this" and seen.note["current_answer"] == "seven"
    assert not seen.done


def test_it_leaves_on_the_end_signal_and_keeps_its_last_words() -> None:
    user = LLMUser(in_turn(says(f"thanks, bye {END_SIGNAL}", "eleven")))
    seen = observe(user, chat("hi", "It is 11.", goal=GOAL))
    assert seen.done and seen.reason == "user"
    assert [m.content for m in seen.messages] == ["thanks, bye"]
    assert seen.metrics["user_ended_early"] == 0
    bare = observe(LLMUser(in_turn(says(END_SIGNAL, "eleven"))), chat("hi", "11", goal=GOAL))
    assert bare.done and bare.messages == ()


@pytest.mark.parametrize("current", ["", "none", "N/A", "nothing yet."])
def test_leaving_with_nothing_counts_as_ended_early(current: str) -> None:
    seen = observe(LLMUser(in_turn(says(END_SIGNAL, current))), chat("hi", "Hm.", goal=GOAL))
    assert seen.metrics["user_ended_early"] == 1


def test_broken_json_is_asked_for_again_with_the_reason() -> None:
    model = in_turn("I would like some help", '{"response": "half', says("ok then"))
    user = LLMUser(model)
    seen = observe(user, chat("hi", "Hello.", goal=GOAL))
    assert seen.messages[0].content == "ok then"
    assert seen.metrics["user_asked_again"] == 2 and seen.metrics["user_broken_json"] == 2
    again = model.requests[1].prompt
    assert [m.role for m in again] == ["user", "assistant", "user"]
    assert "cannot be used" in again[-1].content and again[1].content == "I would like some help"


def test_an_answer_that_stays_unusable_raises_with_a_countable_reason() -> None:
    user = LLMUser(in_turn("no json"), repairs=1)
    conversation = chat("hi", "Hello.", goal=GOAL)
    with pytest.raises(ModelCallError) as caught:
        observe(user, conversation)
    assert caught.value.reason == "user bad_json"
    assert conversation.counts["user_failed"] == 1
    assert user.stats()["user_broken_json"] == 2


def test_an_empty_response_is_asked_again_then_fails_as_empty() -> None:
    user = LLMUser(in_turn(says("  ")), repairs=2)
    with pytest.raises(ModelCallError) as caught:
        observe(user, chat("hi", "Hello.", goal=GOAL))
    assert caught.value.reason == "user empty"
    assert user.stats()["user_empty"] == 3


def test_after_a_truncated_answer_a_shorter_one_is_requested() -> None:
    model = in_turn(Completion('{"current_answer": "a', "length"), says("fine"))
    seen = observe(LLMUser(model), chat("hi", "Hello.", goal=GOAL))
    assert seen.note["flaws"] == ["truncated"]


def test_a_role_flip_is_asked_again_and_counted_when_it_stays() -> None:
    flip = says("Of course! I'd be happy to help. How can I assist you today?")
    user = LLMUser(in_turn(flip), repairs=1)
    seen = observe(user, chat("hi", "Hello.", goal=GOAL))
    assert seen.metrics["user_role_flip"] == 1 and seen.metrics["user_asked_again"] == 2
    assert user.stats()["user_role_flip_rate"] == 1.0
    mended = observe(LLMUser(in_turn(flip, says("what about 13?"))), chat("hi", "Hello.", goal=GOAL))
    assert mended.metrics["user_role_flip"] == 0 and mended.messages[0].content == "what about 13?"


def test_a_pasted_goal_is_measured() -> None:
    user = LLMUser(in_turn(says(f"Please: {GOAL}.")), repairs=0)
    seen = observe(user, chat("hi", "Hello.", goal=GOAL))
    assert seen.metrics["user_goal_pasted"] == 1 and seen.metrics["user_goal_overlap"] == 1.0
    own_words = observe(LLMUser(in_turn(says("need help with a prime thing"))), chat("hi", "Hello.", goal=GOAL))
    assert own_words.metrics["user_goal_overlap"] == 0


@given(st.text(min_size=1, alphabet=st.characters(exclude_categories=["Cs", "Cc"])).filter(lambda t: t.strip()))
def test_text_is_passed_on_unchanged(text: str) -> None:
    said = f"so {text} or what"
    seen = observe(LLMUser(in_turn(says(said, current_answer="42")), repairs=0), chat("hi", "Hello."))
    assert seen.messages[0].content == said.strip()
    assert seen.note["current_answer"] == "42"


def test_latex_survives_even_with_single_backslashes() -> None:
    sloppy = r'{"current_answer": "\frac{1}{2}", "thought": "é", "response": "is it \frac{1}{2} or \theta?"}'
    seen = observe(LLMUser(in_turn(sloppy)), chat("hi", "Hello.", goal=GOAL))
    assert seen.messages[0].content == r"is it \frac{1}{2} or \theta?"
    assert seen.note["current_answer"] == r"\frac{1}{2}"


def test_it_opens_only_an_empty_conversation() -> None:
    user = LLMUser(in_turn(says("hey")))
    fresh = Conversation(Row("r", (Message("system", "be kind"),), goal=GOAL))
    asyncio.run(user.start(fresh))
    assert [m.role for m in fresh.messages] == ["system", "user"]
    assert "you speak first" in user.model.requests[0].prompt[0].content
    begun = chat("hi", goal=GOAL)
    asyncio.run(user.start(begun))
    assert len(begun.turns) == 1


def test_state_is_the_conversations_and_forks_do_not_share_it() -> None:
    user = LLMUser(in_turn(says("one", "a"), says("two", "b")))
    root = chat("hi", "Hello.", goal=GOAL)
    left, right = root.fork("future", 0), root.fork("future", 1)
    observe(user, left)
    observe(user, right)
    assert left.session["user"]["answer"] == "a" and right.session["user"]["answer"] == "b"
    assert "user" not in root.session


def test_calls_carry_a_seed_of_the_conversation() -> None:
    model = in_turn(says("one"))
    user = LLMUser(model)
    root = chat("hi", "Hello.", goal=GOAL)
    for fork in (root.fork("future", 0), root.fork("future", 1), root.fork("future", 0)):
        observe(user, fork)
    first, second, again = (request.sampling.seed for request in model.requests)
    assert first == again != second


def test_a_thousand_conversations_at_once_never_mix_their_goals() -> None:
    async def answer(request: Request) -> str:
        prompt = request.prompt[0].content
        await asyncio.sleep(0)
        return says("it is " + prompt.split("<goal>\n")[1].split("\n")[0])

    user = LLMUser(speaker(answer), repairs=0)

    async def main() -> list[tuple[str, str]]:
        conversations = [chat("hi", "Hello.", goal=f"g{i}") for i in range(1000)]
        seen = await asyncio.gather(*(user.observe(c) for c in conversations))
        return [(c.row.goal, o.messages[0].content) for c, o in zip(conversations, seen, strict=True)]

    assert all(said == f"it is {goal}" for goal, said in asyncio.run(main()))


def test_structured_output_is_requested_if_the_model_supports_it() -> None:
    model = in_turn(says("ok"))
    observe(LLMUser(model), chat("hi", "Hello."))
    assert set(model.requests[0].schema["properties"]) == {"current_answer", "thought", "response"}
    assert model.requests[0].role == "user"


def test_recipes_name_it_and_its_model() -> None:
    model = in_turn(says("ok"))
    made = users.create("llm", {"model": "helper", "vagueness": "high"}, "futures.user", models={"helper": model})
    assert isinstance(made, LLMUser) and made.model is model
    with pytest.raises(UserError, match="did you mean 'helper'"):
        users.create("llm", {"model": "helpr"}, "futures.user", models={"helper": model})
    with pytest.raises(UserError, match="vagueness"):
        users.create("llm", {"model": "helper", "vagueness": "fog"}, "futures.user", models={"helper": model})


def test_a_users_own_template_is_used(tmp_path) -> None:
    path = tmp_path / "mine.j2"
    path.write_text("Be brief. Goal: {{ goal }}. End: {{ end_signal }}", encoding="utf-8")
    assert LLMUser(in_turn(says("ok")), template=str(path)).prompt(chat("hi", goal="tea")) == (
        "Be brief. Goal: tea. End: [[TERMINATE CHAT]]"
    )
    with pytest.raises(UserError, match="no prompt template"):
        LLMUser(in_turn(says("ok")), template="usr").prompt(chat("hi"))


def test_template_placeholders_in_messages_stay_text() -> None:
    prompt = LLMUser(in_turn(says("ok"))).prompt(chat("{{ 7 * 7 }} {% raw %}", goal="{{ goal }}"))
    assert "{{ 7 * 7 }} {% raw %}" in prompt and "{{ goal }}" in prompt


def test_counters_add_up_over_a_conversation() -> None:
    user = LLMUser(in_turn(says("one"), says("two")))
    conversation = chat("hi", "Hello.", goal=GOAL)
    for _ in range(2):
        conversation.count(observe(user, conversation).metrics)
    assert conversation.counts["user_turns"] == 2 == user.stats()["user_turns"]
    assert json.dumps(user.stats())
