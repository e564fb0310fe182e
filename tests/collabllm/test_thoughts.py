"""Thoughts are private to the policy: neither the simulated user nor the judge sees them."""

import asyncio
from dataclasses import replace

from tests.collabllm.stage import act, actor, rows, scene
from upshot.rollout.play import ReplyRule, play_step


def spoken(answer: str) -> tuple[list[str], list]:
    """The prompts that everybody received while the policy gave these answers, and the replies."""
    asked: list[str] = []

    def say(prompt: str) -> str:
        asked.append(prompt)
        helper = prompt.startswith("You play a person") or '"accuracy":' in prompt or '"interactivity":' in prompt
        return act(prompt) if helper else answer

    context = replace(scene(actor(say=say), rounds=1), malformed=ReplyRule("penalty", -1.0))
    groups = asyncio.run(play_step(context, rows(1), 1, seed=0))
    helpers = [p for p in asked if p.startswith("You") and ("play a person" in p or '"thought"' in p)]
    return helpers, groups[0]


def test_thoughts_are_shown_to_nobody_else() -> None:
    helpers, (reply,) = spoken("<think>my secret plan</think>Which one is it?")
    assert len(helpers) == 3 and all("secret" not in prompt for prompt in helpers)
    assert any("Which one is it?" in prompt for prompt in helpers)
    assert reply.conversation.turns[-1].note["thought"] == "my secret plan"


def test_a_reply_that_only_thinks_follows_the_rule_for_malformed_ones() -> None:
    helpers, (reply,) = spoken("<think>my secret plan</think>")
    assert helpers == [] and reply.reward.total.value == -1.0
