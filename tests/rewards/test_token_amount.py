"""token_amount: the same number for the same words, whoever sampled them."""

import asyncio

import pytest

from tests.tasks.participants.speakers import chat
from upshot.core.conversation import Conversation, Message, Sample
from upshot.rewards.metrics.token_amount import TokenAmount


class Words:
    """A tokenizer with one token per word."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[str]:
        assert not add_special_tokens
        return text.split()


def amount(conversation: Conversation, tokenizer: Words | None = None) -> float | None:
    return asyncio.run(TokenAmount(tokenizer).score(conversation)).value


def said(text: str, sample: Sample | None = None, **note: object) -> Conversation:
    conversation = chat("hi there you")
    conversation.say(Message("assistant", text), sample, note)
    return conversation


SAMPLED = Sample((), (1, 2, 3, 4, 5, 6), (0.0,) * 6, "stop")


@pytest.mark.parametrize(
    "conversation",
    [said("one two three"), said("one two three", SAMPLED), said("one two three", tokens=17, finish="stop")],
    ids=["a file", "the engine", "an endpoint"],
)
def test_the_same_words_count_the_same_by_every_route(conversation: Conversation) -> None:
    assert amount(conversation, Words()) == 3


def test_a_thought_is_counted_as_well() -> None:
    assert amount(said("one two", SAMPLED, thought="a b c"), Words()) == 5


def test_without_a_tokenizer_the_best_available_count_is_used_or_it_is_missing() -> None:
    assert amount(said("one two", SAMPLED)) == 6
    assert amount(said("one two", tokens=17)) == 17
    assert amount(said("one two")) is None
