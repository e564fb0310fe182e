"""Dual control: user and policy act on the conversation's own state; failures are missing, and nothing is mixed up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.tasks.participants.speakers import in_turn, speaker
from upshot.config.load import load_recipe
from upshot.core.conversation import Conversation, Message, Row, derive_seed
from upshot.core.score import Reason
from upshot.core.time_limit import call_seconds
from upshot.models.base import Abilities, Completion, Model, Request
from upshot.models.rendering import Renderer
from upshot.models.tiny import tiny_tokenizer
from upshot.offline.replay import read_reply, score_again
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.rollout.reply import Rollout
from upshot.rollout.services import assemble, build_context, build_services
from upshot.tasks.base import tasks
from upshot.tasks.dual.shop import ORDERS, Caller, ShopTask, call
from upshot.tasks.participants.base import Observation, User
from upshot.tasks.participants.dual import DualControl
from upshot.tasks.users.plain import PlainUser

TASK = ShopTask(rows_per_split=64)
TOKENIZER = tiny_tokenizer(TASK.vocabulary())
Choose = Callable[[str, int], str]


class Clerk(Model):
    """A policy that says what a function of the whole prompt and the seed returns."""

    name = "clerk"
    abilities = Abilities(ids_in=True, ids_out=True)

    def __init__(self, choose: Choose) -> None:
        self.choose = choose

    async def generate(self, request: Request) -> list[Completion]:
        text = self.choose(TOKENIZER.decode([int(i) for i in request.prompt]), request.sampling.seed or 0)  # type: ignore[arg-type]
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
        for _ in range(len(text) % 3):  # other conversations run in between
            await asyncio.sleep(0)
        return [Completion(text, "stop", tuple(ids), tuple(-0.5 for _ in ids))]


def lines_of(prompt: str) -> list[str]:
    """What was said."""
    said = prompt.replace("<|user|>", " ").replace("<|assistant|>", " ").split("<|end|>")
    return [line.strip() for line in said if line.strip()]


def right(prompt: str, _: int) -> str:
    """Does everything right, looking only at what was said."""
    said = lines_of(prompt)
    opening, last = said[0], said[-1]
    order = opening.split()[-1]
    if "refund" in opening:
        if "[refund]" in last:
            return "done"
        if "[look]" not in prompt:
            return call("look", order)
        asked = "send it back" in prompt
        return "please send it back" if "[look] arrived" in prompt and not asked else call("refund", order)
    if "[check_line]" not in prompt:
        return call("check_line")
    if "box off" in prompt:
        return "done" if "restarted" in last else "please restart your box"
    return "done" if "[switch_on]" in last else call("switch_on")


def context(choose: Choose, user: Any = None, **overrides: Any) -> RolloutContext:
    """The recipe's own context, with a policy played by a function."""
    words = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    recipe = load_recipe("recipes/shop.yaml", words).recipe
    model, renderer = Clerk(choose), Renderer(TOKENIZER)
    services = build_services(recipe, TASK, model, TOKENIZER, renderer)
    if user is not None:
        services.user = DualControl(user, TASK.environment())
        futures, with_user = recipe.futures, recipe.episode.with_user
        services.futures = Talk(
            services.metrics, services.weights, services.user, futures.samples, futures.rounds, with_user=with_user
        )
    return build_context(recipe, services, Policy(model, renderer))


def play(scene: RolloutContext, rows: list[Row], group: int = 1, seed: int = 0) -> list[Rollout]:
    return [reply for group in asyncio.run(play_step(scene, rows, group, seed)) for reply in group]


def kind(name: str) -> Row:
    return next(row for row in TASK.rows("train") if row.meta["kind"] == name)


@pytest.mark.parametrize("name", ["lost", "arrived", "line", "box"])
def test_the_final_state_is_scored_and_both_sides_calls_are_distinguished(name: str) -> None:
    (reply,) = play(context(right), [kind(name)])
    assert reply.reward.means["verifier"].value == 1 and reply.conversation.ended == "user"
    by = [act["by"] for act in reply.conversation.session["acts"]]
    assert by.count("user") == (name in ("arrived", "box")) and "policy" in by
    noted = [turn.note["acts"] for turn in reply.conversation.turns if "acts" in turn.note]
    assert sum(map(len, noted)) == by.count("user")
    trained = [turn.message.role for turn in reply.conversation.turns if turn.sample is not None]
    assert set(trained) == {"assistant"}, "what the user does is nobody's loss"
    assert not any("send_back" in message.content for message in reply.conversation.messages)


def test_omitting_the_callers_part_earns_nothing() -> None:
    steps = {0: call("look", "{}"), 1: call("refund", "{}"), 2: "done"}
    row = kind("arrived")
    hasty = context(lambda prompt, _: steps[prompt.count("<|assistant|>") - 1].replace("{}", row.goal))
    (reply,) = play(hasty, [row])
    assert reply.reward.means["verifier"].value == 0


def test_the_policy_can_end_the_conversation_for_both_sides() -> None:
    mix = {"futures__rounds": 2, "futures__samples": 2, "episode__max_turns": 1}
    (reply,) = play(context(lambda *_: call("hang_up"), **mix), [kind("line")])
    assert reply.conversation.ended == "turns", "the tool is called by the futures, which begin with it"
    assert [future.conversation.ended for future in reply.futures] == ["policy", "policy"]
    (reply,) = play(context(lambda *_: call("hang_up")), [kind("line")])
    assert reply.conversation.ended == "policy" and len(reply.conversation.session["acts"]) == 1


def test_user_turns_inside_the_episode_futures_after_it_and_credit_along_the_tree() -> None:
    mix = {"episode__max_turns": 2, "futures__rounds": 3, "futures__samples": "[2, 2]", "credit__by": "tree"}
    replies = play(context(right, **mix), [kind("arrived"), kind("line")], 2)
    for reply in replies:
        first = reply.conversation
        assert first.ended == "turns" and len(list(first.samples())) == 2
        acts = len(first.session["acts"])
        for future in reply.futures:
            assert future.scores["verifier"].value == 1 and future.conversation.ended == "user"
            own = future.conversation.session["acts"]
            assert own[:acts] == first.session["acts"]
            called = [(act["by"], act["name"]) for act in own]
            assert len(called) == len(set(called)), "no call of the episode's last turn is made twice"
        assert reply.siblings and all(branch.reward.total.value for fork in reply.siblings for branch in fork)
        assert TASK.state.of(first) != first.row.reference, "what futures do is theirs"


def test_a_line_of_the_user_is_not_used_up_by_an_observation_that_nobody_hears() -> None:
    mix = {"episode__max_turns": 2, "futures__rounds": 2, "futures__user": "{name: scripted, lines: [a, b, c, d]}"}
    (reply,) = play(context(lambda *_: "done", **mix), [kind("line")])
    heard = [turn.message.content for turn in reply.futures[0].conversation.turns if turn.message.role == "user"]
    assert heard[1:] == ["a", "b", "c"]


def test_a_user_that_left_in_the_episode_does_not_return_in_futures() -> None:
    mix = {"futures__rounds": 3, "futures__samples": 3, "credit__by": "tree"}
    (reply,) = play(context(right, **mix), [kind("lost")])
    assert reply.conversation.ended == "user" and len(reply.futures) == 1
    assert not reply.futures[0].by and not reply.siblings and reply.reward.means["verifier"].value == 1


def test_a_fork_starts_with_the_current_state_and_then_has_its_own() -> None:
    conversation = Conversation(kind("arrived"))
    begun = TASK.state.of(conversation)
    fork = conversation.fork("future", 0)
    tool = TASK.state.policy.tools["refund"]
    assert asyncio.run(tool.call({"order": conversation.row.goal}, fork)) == "refunded"
    assert TASK.state.of(conversation) == begun == conversation.row.meta["shop"]
    assert TASK.state.of(fork)["orders"][conversation.row.goal]["refunded"]


def plain(*texts: str) -> PlainUser:
    return PlainUser(in_turn(*texts), task=TASK)


SEND = '<tool_call>{"name": "send_back", "arguments": {"order": "%s"}}</tool_call>'


def test_the_results_of_a_users_tool_calls_are_shown_to_the_user_and_not_the_policy() -> None:
    row = kind("arrived")
    user = plain(SEND % "99", SEND % row.goal, "i sent it back", "[END]")
    (reply,) = play(context(right, user), [row])
    assert reply.reward.means["verifier"].value == 1 and reply.conversation.ended == "user"
    asked = [request.prompt for request in user.model.requests]  # type: ignore[attr-defined]
    assert [message.content for message in asked[2][-4:]] == [
        *(SEND % "99", "[send_back] error: no such order", SEND % row.goal, "[send_back] sent")
    ]
    again = [message.content for message in asked[3]]
    assert "[send_back] sent" in again and any("send_back" in text for text in again), "it remembers what it did"
    assert not any("send_back" in message.content for message in reply.conversation.messages)


@pytest.mark.parametrize(
    ("user", "why"),
    [
        (plain(SEND.replace("send_back", "refund") % "17"), "'refund', which is not one of its tools"),
        (plain(SEND % "99"), "more than 16 tool calls in one turn"),
    ],
)
def test_a_user_that_breaks_its_rules_makes_the_future_missing(user: PlainUser, why: str) -> None:
    (reply,) = play(context(right, user, futures__rounds=2, episode__max_turns=1), [kind("box")])
    tools_first = reply.futures[0]
    assert tools_first.missing == Reason.USER_RULES and why in tools_first.scores["verifier"].why
    assert reply.reward.total.is_missing


def test_a_tool_that_raises_costs_only_its_own_future_and_a_refused_call_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(shop: dict[str, Any], order: str) -> str:
        shop["orders"].clear()
        raise RuntimeError("the till is on fire") if order == broken_order else ValueError("no")

    broken_order = kind("lost").goal
    monkeypatch.setattr(TASK.state.policy.tools["look"], "function", broken)
    other = replace(kind("arrived"), id="other")
    hit, refused = play(context(lambda prompt, seed: right(prompt, seed)), [kind("lost"), other])
    assert hit.reward.total.reason == Reason.ERROR and "the till is on fire" in hit.reward.total.why
    assert not refused.reward.total.is_missing
    assert TASK.state.of(refused.conversation)["orders"].keys() == other.meta["shop"]["orders"].keys()


class Mute(User):
    """Never says anything."""

    async def observe(self, conversation: Conversation) -> Observation:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("who", ["user", "tool"])
def test_a_user_or_tool_that_never_answers_costs_its_own_episode(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(shop: dict[str, Any], order: str) -> str:
        while order == kind("lost").goal:
            pass
        return "arrived"

    if who == "tool":
        monkeypatch.setattr(TASK.state.policy.tools["look"], "function", stuck)
    before = call_seconds.set(1.0)
    try:
        hit, other = play(context(right, Mute() if who == "user" else None), [kind("lost"), kind("line")])
    finally:
        call_seconds.reset(before)
    assert hit.reward.total.reason == "timeout" and "more than 1 s (call_seconds)" in hit.reward.total.why
    assert other.reward.total.is_missing == (who == "user")


def wild(prompt: str, seed: int) -> str:
    """Any call in any order, or words, drawn from the seed."""
    rng = random.Random(derive_seed(seed, len(prompt)))
    order = rng.choice([*ORDERS, prompt.split("<|end|>")[0].split()[-1]])
    calls = [call("look", order), call("refund", order), call("check_line"), call("switch_on"), call("hang_up")]
    return rng.choice([*calls, "please send it back", "please restart your box", "done", right(prompt, 0)])


def test_two_hundred_wild_conversations_at_once_end_as_each_does_alone() -> None:
    """One task, one user, one policy, with failing tools and users that break their rules."""

    def moody(request: Request) -> str:
        rng = random.Random(request.sampling.seed)
        goal = next(m.content for m in request.prompt).split("want: ")[1][:2]  # type: ignore[union-attr]
        foreign = SEND.replace("send_back", "refund") % goal
        return rng.choice([SEND % goal, SEND % "99", "i sent it back", "what do you mean", "[END]", foreign])

    mix = {"episode__max_turns": 3, "futures__rounds": 3, "futures__samples": 2}

    def scene() -> RolloutContext:
        return context(wild, PlainUser(speaker(moody), task=TASK), **mix)

    rows = TASK.rows("train")[:50]
    together = asyncio.run(play_step(scene(), rows, 4, seed=7))
    missing = 0
    for number, group in enumerate(together):
        alone = asyncio.run(play_step(scene(), rows, 4, seed=7, only=[number]))[0] if number % 10 == 0 else group
        for one, other in zip(group, alone, strict=True):
            assert _told(one) == _told(other)
            for future in one.futures:
                missing += future.missing is not None
                again = Conversation(one.conversation.row)
                again.session["acts"] = future.conversation.session.get("acts", [])
                assert TASK.state.of(again) == TASK.state.of(future.conversation), "its own acts explain its state"
    assert missing > 10, "users that broke their rules were among them"


def _told(reply: Rollout) -> Any:
    return reply.to_dict(1)


def test_a_finished_run_can_be_rescored_from_its_recorded_calls() -> None:
    scene = context(right, episode__max_turns=2, futures__rounds=3, futures__samples=2)
    (reply,) = play(scene, [kind("arrived")])
    line = reply.to_dict(1)
    again = read_reply(line, {row.id: row for row in TASK.rows("train")}, list(reply.conversation.samples()))
    asyncio.run(score_again(scene, again))
    assert again.reward.means["verifier"] == reply.reward.means["verifier"]
    assert all("state" in future.conversation.session for future in again.futures)


def test_in_a_mix_each_rows_own_tools_answer_its_calls() -> None:
    mix = tasks.create("mix", {"tasks": [{"name": "shop"}, {"name": "withheld"}]})
    rows = {row.meta["mix_task"]: row for row in mix.rows("train") if row.meta.get("kind", "lost") == "lost"}
    restart = '<tool_call>{"name": "restart_box", "arguments": {}}</tool_call>'
    for chosen in (mix.user(), PlainUser(in_turn("as you like", restart, "i did"), task=mix)):
        user = assemble(mix, {}, user=chosen).user
        assert user is not None and user.answers_calls()
        look = Conversation(rows["shop"])
        look.say(Message("assistant", call("look", look.row.goal)))
        assert asyncio.run(user.observe(look)).messages == (Message("user", "[look] lost"),)
        talk = Conversation(rows["withheld"])
        talk.say(Message("assistant", call("look", "7")))
        assert "[look]" not in str(asyncio.run(user.observe(talk)).messages), "this row's task has no tools"
    shop = Conversation(rows["shop"])
    shop.say(Message("assistant", "please restart your box"))
    heard = asyncio.run(user.observe(shop))
    assert [act["name"] for act in heard.note["acts"]] == ["restart_box"], "a recipe's user has its row's tools"


def test_the_caller_counts_every_turn_and_its_leaving() -> None:
    caller = TASK.user()
    assert isinstance(caller, Caller)
    row = TASK.rows("train")[0]
    for said in ("hm", "all done"):
        conversation = Conversation(row)
        conversation.say(Message("assistant", said))
        asyncio.run(caller.observe(conversation))
    assert caller.stats() == {"user_ended": 1.0, "user_turns": 1.0}
