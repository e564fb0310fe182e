"""Conversations: exact ids, masks, forks that share their prefix, state that never mixes."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.core.conversation import Conversation, Message, Row, Sample, derive_seed

ids = st.lists(st.integers(0, 1000), max_size=6).map(tuple)
samples = st.tuples(ids, ids.filter(len)).map(lambda p: Sample(p[0], p[1], (-0.5,) * len(p[1]), "stop"))


def conversation(*given_samples: Sample) -> Conversation:
    talk = Conversation(Row("r", (Message("user", "hi"),)), seed=3)
    for sample in given_samples:
        talk.say(Message("assistant", "…"), sample)
        talk.say(Message("user", "and?"))
    return talk


@given(st.lists(samples, max_size=5))
def test_ids_mask_and_logprobs_follow_who_sampled(parts: list[Sample]) -> None:
    talk = conversation(*parts)
    assert len(talk.ids) == len(talk.mask) == len(talk.logprobs)
    assert [i for i, bit in zip(talk.ids, talk.mask, strict=True) if bit] == [i for p in parts for i in p.ids]
    assert all(value == 0.0 for value, bit in zip(talk.logprobs, talk.mask, strict=True) if not bit)


@given(st.lists(samples, min_size=1, max_size=4), st.lists(samples, min_size=1, max_size=3))
def test_a_fork_shares_its_prefix_and_leaves_the_original_alone(before: list[Sample], after: list[Sample]) -> None:
    talk = conversation(*before)
    turns = talk.turns
    fork = talk.fork("future", 0)
    for sample in after:
        fork.say(Message("assistant", "!"), sample)
    assert talk.turns is turns
    assert all(ours is theirs for ours, theirs in zip(talk.turns, fork.turns, strict=False))
    assert fork.ids[: len(talk.ids)] == talk.ids


def test_forks_have_their_own_random_stream_and_session() -> None:
    talk = conversation()
    talk.session["memory"] = "mine"
    first, second, again = talk.fork("future", 0), talk.fork("future", 1), talk.fork("future", 0)
    assert first.rng.random() != second.rng.random()
    assert first.seed == again.seed
    first.session["memory"] = "theirs"
    assert talk.session["memory"] == second.session["memory"] == "mine"


def test_only_messages_since_the_last_sample_are_still_to_be_rendered() -> None:
    talk = conversation(Sample((1,), (2,), (-1.0,), "stop"))
    assert [message.content for message in talk.unrendered] == ["and?"]
    assert [message.content for message in conversation().unrendered] == ["hi"]


def test_a_sample_must_have_a_log_probability_per_id() -> None:
    with pytest.raises(ValueError, match="2 ids came with 1"):
        Sample((), (1, 2), (0.0,), "stop")


def test_tool_calls_survive_the_dictionary_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    data = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert Message.from_dict({**data, "content": None}).to_dict() == data


def test_seeds_depend_on_every_key_and_are_the_same_on_every_machine() -> None:
    assert derive_seed(0, "a", 1) == 1497209822362405998
    assert len({derive_seed(s, k, i) for s in range(5) for k in "ab" for i in range(5)}) == 50


def test_a_thousand_concurrent_conversations_keep_their_own_goals() -> None:
    """One participant object and a thousand conversations taking turns in random order: nothing is mixed up."""
    from upshot.models.base import Abilities, Completion, Model, Request
    from upshot.rollout.episode import Policy, play_future
    from upshot.tasks.participants.base import Observation, Participant

    class GoalTeller(Participant):
        async def observe(self, talk: Conversation) -> Observation:
            await asyncio.sleep(talk.rng.random() * 0.01)
            talk.session["told"] = [*talk.session.get("told", []), talk.row.goal]
            return Observation((Message("user", f"my goal is {talk.row.goal}"),))

    class Echo(Model):
        name = "echo"
        abilities = Abilities()

        async def generate(self, request: Request) -> list[Completion]:
            await asyncio.sleep(0.001)
            return [Completion(request.prompt[-1].content, "stop")]  # type: ignore[union-attr]

    async def play() -> list[Conversation]:
        user, policy = GoalTeller(), Policy(Echo())
        talks = [Conversation(Row(str(n), (Message("user", "hi"),), goal=n), seed=n) for n in range(1000)]
        await asyncio.gather(*(play_future(talk, user, policy, 3) for talk in talks))
        return talks

    for n, talk in enumerate(asyncio.run(play())):
        assert talk.session["told"] == [n] * 3
        assert {m.content for m in talk.messages[1:]} == {f"my goal is {n}"}


def test_forks_share_no_nested_state_except_what_cannot_be_copied() -> None:
    talk = Conversation(Row("r", ()))
    talk.session = {"cart": {"items": ["lamp"]}, "lock": threading.Lock()}
    first, second = talk.fork("future", 0), talk.fork("future", 1)
    first.session["cart"]["items"].append("sofa")
    assert second.session["cart"] == talk.session["cart"] == {"items": ["lamp"]}
    assert first.session["lock"] is talk.session["lock"]
