"""Multi-turn task episodes: every sample has its own transcript, observations have their roles and no loss, ids are
kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from upshot.core.conversation import Conversation, Row
from upshot.models.base import Abilities, Completion, Model, Request
from upshot.models.rendering import Renderer
from upshot.models.tiny import tiny_tokenizer
from upshot.rewards.credit import MetricWeight
from upshot.rewards.metric import VerifierMetric
from upshot.rewards.metrics.format_errors import FormatErrors
from upshot.rewards.workers.pool import InlineManager
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.tasks.gsm8k import NO_LINE, Gsm8k

TASK = Gsm8k(file="arithmetic", limit=8)
TOKENIZER = tiny_tokenizer([*TASK.vocabulary(), "41", "42"])


class Recites(Model):
    """A policy with scripted texts, one per turn of a conversation; which one depends only on the prompt."""

    name = "recites"
    abilities = Abilities(ids_in=True, ids_out=True)

    def __init__(self, choose: Any) -> None:
        self.choose = choose
        self.calls = 0
        self.asked: list[list[int]] = []
        self.said: list[list[int]] = []

    async def generate(self, request: Request) -> list[Completion]:
        prompt = [int(i) for i in request.prompt]  # type: ignore[arg-type]
        text = self.choose(self.calls, TOKENIZER.decode(prompt))
        self.calls += 1
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
        self.asked.append(prompt)
        self.said.append(ids)
        await asyncio.sleep(0)
        return [Completion(text, "stop", tuple(ids), tuple(-0.5 for _ in ids))]


def scene(model: Recites, max_turns: int = 5) -> RolloutContext:
    policy = Policy(model, Renderer(TOKENIZER))
    metrics = {"verifier": VerifierMetric(TASK, InlineManager()), "format_errors": FormatErrors(TASK)}
    weights = {"verifier": MetricWeight(1.0), "format_errors": MetricWeight(-0.2)}
    return RolloutContext(policy, Talk(metrics, weights), environment=TASK.environment(), max_turns=max_turns)


def rows(truth: str = "42") -> list[Row]:
    return [Row(f"r{n}", TASK.rows("train")[n].messages, None, truth, "gsm8k") for n in range(4)]


def test_replies_41_and_42_to_a_question_with_answer_42_score_0_and_1_in_every_epoch() -> None:
    for epoch in range(3):
        model = Recites(lambda call, _: "#### 41" if call % 2 == 0 else "#### 42")
        groups = asyncio.run(play_step(scene(model), rows(), 2, seed=epoch))
        for group in groups:
            answers = {reply.conversation.turns[-1].message.content: reply.reward.total.value for reply in group}
            assert answers == {"#### 41": 0.0, "#### 42": 1.0}


def test_samples_of_one_prompt_share_nothing_but_the_prompt() -> None:
    model = Recites(lambda call, _: "#### 42" if call % 3 else "so the answer is 42")
    groups = asyncio.run(play_step(scene(model), rows()[:1], 12, seed=0))
    for reply in groups[0]:
        said = [m.content for m in reply.conversation.messages]
        faults = said.count(NO_LINE["####"])
        assert reply.conversation.counts.get("format_errors", 0) == faults
        assert reply.reward.total.value == pytest.approx(1.0 - 0.2 * faults / (faults + 1))


def five_turns() -> tuple[Recites, Conversation]:
    model = Recites(lambda _, prompt: "#### 42" if prompt.count("<|assistant|>") == 5 else "so the answer is 42")
    (group,) = asyncio.run(play_step(scene(model), rows()[:1], 1, seed=0))
    return model, group[0].conversation


def test_ids_trained_are_the_ids_sampled_over_five_turns() -> None:
    model, conversation = five_turns()
    samples = list(conversation.samples())
    assert len(samples) == 5
    assert [list(sample.ids) for sample in samples] == model.said
    for number, prompt in enumerate(model.asked):
        before = [i for sample in samples[:number] for i in (*sample.context, *sample.ids)]
        assert prompt == [*before, *samples[number].context]  # every prompt extends the previous one, token by token
    assert [i for i, bit in zip(conversation.ids, conversation.mask, strict=True) if bit] == [
        i for said in model.said for i in said
    ]


def test_observations_carry_their_role_tokens_and_no_loss() -> None:
    _, conversation = five_turns()
    observation = TOKENIZER.encode(f"<|user|>{NO_LINE['####']}<|end|><|assistant|>", add_special_tokens=False)
    for sample in list(conversation.samples())[1:]:
        assert list(sample.context) == observation
    masked = [i for i, bit in zip(conversation.ids, conversation.mask, strict=True) if not bit]
    assert masked.count(TOKENIZER.convert_tokens_to_ids("<|user|>")) == 5
    assert conversation.ended == "answered"


def test_the_last_observation_is_counted_but_not_appended() -> None:
    model = Recites(lambda *_: "so the answer is 42")
    (group,) = asyncio.run(play_step(scene(model, max_turns=3), rows()[:1], 1, seed=0))
    conversation = group[0].conversation
    assert conversation.turns[-1].message.role == "assistant"
    assert conversation.counts["format_errors"] == 3
    assert conversation.ended == "turns"
