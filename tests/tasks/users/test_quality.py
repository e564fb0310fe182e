"""Measures of the quality of a simulated user's messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.tasks.users.quality import copied_share, is_early_end, is_role_flip, overlap

SENTENCE = st.lists(st.sampled_from(["red", "blue", "cat", "dog", "runs", "far", "42", "été"]), min_size=3, max_size=30)


@given(SENTENCE)
def test_a_copy_overlaps_fully(words: list[str]) -> None:
    text = " ".join(words)
    assert overlap(text, f"well, {text.upper()}!") == 1.0


@given(SENTENCE, SENTENCE)
def test_overlap_is_a_share(a: list[str], b: list[str]) -> None:
    assert 0.0 <= overlap(" ".join(a), " ".join(b)) <= 1.0


def test_a_paragraph_of_a_long_goal_is_pasted_too() -> None:
    paragraphs = [" ".join(f"w{p}x{i}" for i in range(40)) for p in range(30)]
    goal = "\n\n".join(paragraphs)
    assert overlap(goal, paragraphs[3]) < 0.05
    assert copied_share(goal, f"please write this: {paragraphs[3]}") > 0.8
    assert (
        copied_share(goal, "please write something about w3x1 w3x2 that my friends will like to read on a rainy day")
        == 0.0
    )


def test_goals_of_a_word_or_two_cannot_be_called_copied() -> None:
    assert overlap("42", "it is 42") == 0.0
    assert overlap("", "anything") == 0.0


@pytest.mark.parametrize(
    "message",
    [
        "How can I help you today?",
        "As an AI language model, I cannot eat soup.",
        "Sure! Here is the solution:",
        "I’d be happy to help with that.",
        "Assistant: the answer is 4",
        "Feel free to ask if anything is unclear.",
    ],
)
def test_assistant_talk_is_a_role_flip(message: str) -> None:
    assert is_role_flip(message)


@pytest.mark.parametrize(
    "message",
    ["can you help me with this?", "sure", "no, I meant the other one", "ok here it is: 12", "of course I know that"],
)
def test_user_talk_is_not(message: str) -> None:
    assert not is_role_flip(message)


def test_an_echo_of_the_assistant_is_a_role_flip() -> None:
    said = "First we move the three to the other side, then we divide both sides by two, which gives x equals four."
    assert is_role_flip(said, said)
    assert not is_role_flip("why divide both sides by two?", said)


def test_leaving_before_the_assistant_spoke_is_early() -> None:
    assert is_early_end(False, "something") and is_early_end(True, " ") and not is_early_end(True, "x = 2")
