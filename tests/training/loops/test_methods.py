"""Offline DPO, online DPO and PPO: what they read, which replies they compare, and how they reward."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tiny_parts, tiny_policy
from tests.training.workshop import datum, learner, metrics, recipe
from upshot.config.load import load_recipe
from upshot.config.recipe import TrainConfig
from upshot.core.conversation import Conversation, Message
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.rewards.credit import Credit, Reward, Span, credit_sampled
from upshot.rollout.episode import play_episode
from upshot.rollout.reply import Rollout
from upshot.run.run import train
from upshot.tasks.datasets.records import Preference, read_dialogues, read_preferences
from upshot.training.learner.batch import Datum
from upshot.training.loops import online_dpo, ppo, rl
from upshot.training.loops.dpo import render_pairs
from upshot.training.loops.ppo import gae

PAIR = {"prompt": "i want a lamp", "chosen": "which size ?", "rejected": "here is a red lamp"}


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def scored(gap: float, **more: Any) -> dict[str, Any]:
    return {**PAIR, "score_chosen": 0.2 + gap, "score_rejected": 0.2, **more}


def test_pairs_below_the_gap_are_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, [scored(0.5), scored(0.1), scored(0.05)])
    assert len(read_preferences(file, 0.1)) == 2, "0.3 - 0.2 counts as 0.1"
    assert len(read_preferences(file, 0.0)) == 3


def test_without_a_gap_no_scores_are_needed_and_with_one_they_are(tmp_path: Path) -> None:
    file = write(tmp_path, [PAIR])
    assert read_preferences(file, 0.0)[0].prompt == (Message("user", "i want a lamp"),)
    with pytest.raises(UserError, match=r"row 1 has no 'score_chosen' \(train.dpo.min_gap is 0.1\)"):
        read_preferences(file, 0.1)


def test_pairs_of_whole_conversations_share_their_beginning(tmp_path: Path) -> None:
    asked = [
        {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "hello"), ("user", "a lamp"))
    ]
    good, bad = ([*asked, {"role": "assistant", "content": text}] for text in ("which size ?", "here"))
    (pair,) = read_preferences(write(tmp_path, [{"id": "1", "prompt": "hi", "chosen": good, "rejected": bad}]), 0.0)
    assert (pair.chosen, pair.rejected) == ("which size ?", "here")
    assert [message.content for message in pair.prompt] == ["hi", "hello", "a lamp"]
    with pytest.raises(UserError, match="expected one assistant message"):
        read_preferences(write(tmp_path, [{"prompt": "hi", "chosen": good, "rejected": bad[1:]}]), 0.0)


@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
def test_a_missing_column_is_named_with_the_row(column: str, tmp_path: Path) -> None:
    rows = [PAIR, {key: value for key, value in PAIR.items() if key != column}]
    with pytest.raises(UserError, match=f"row 2 has no '{column}'"):
        read_preferences(write(tmp_path, rows), 0.0)


def test_a_reply_is_one_assistant_message(tmp_path: Path) -> None:
    talk = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"}]
    with pytest.raises(UserError, match="'chosen': expected one assistant message, found assistant, user"):
        read_preferences(write(tmp_path, [{**PAIR, "chosen": talk}]), 0.0)


def test_dialogues_need_messages(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no 'messages'"):
        read_dialogues(write(tmp_path, [{"text": "hello"}]))
    with pytest.raises(UserError, match="there is no file"):
        read_dialogues(str(tmp_path / "none.parquet"))


def test_a_pair_is_trained_on_its_replies_only_and_rendered_as_a_rollout_would_be() -> None:
    _, tokenizer, renderer, _ = tiny_parts()
    history = (Message("user", "hello"), Message("assistant", "which thing ?"), Message("user", "a lamp"))
    ((chosen, rejected),) = render_pairs([Preference(history, "which size ?", "here is a lamp")], renderer, 0)
    prompt = renderer.prompt_ids(history)
    for own, text in ((chosen, "which size ?"), (rejected, "here is a lamp")):
        assert own.ids[: len(prompt)] == prompt and own.mask == [0] * len(prompt) + [1] * (len(own.ids) - len(prompt))
        assert tokenizer.decode(own.ids[len(prompt) : -1]) == text and own.ids[-1] == renderer.end_id
    assert render_pairs([Preference(history, "which size ?", "here is a lamp")], renderer, len(prompt) + 3) == []


def test_offline_dpo_learns_the_preference_over_epochs(tmp_path: Path) -> None:
    file = write(tmp_path, [scored(0.5), scored(0.4, prompt="i need a bowl"), scored(0.01)])
    settings = {
        "data": file,
        "dpo": {"min_gap": 0.1},
        "epochs": 6,
        "prompts_per_step": 2,
        "lr": 0.01,
        "save": {"every": 0},
    }
    made = recipe(tmp_path / "run", method="dpo", warm=False, **settings)
    made.train.steps = 0
    train(made)
    lines = metrics(tmp_path / "run")
    assert len(lines) == 6, "6 epochs of 2 pairs, 2 a step"
    assert lines[0]["loss/dpo"] == pytest.approx(0.6931, abs=1e-3), "it starts at its reference"
    assert lines[-1]["dpo/accuracy"] == 1 and lines[-1]["loss/dpo"] < 0.6


def test_dpo_without_a_file_or_without_a_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs train\.data"):
        train(recipe(tmp_path / "one", method="dpo", warm=False))
    file = write(tmp_path, [scored(0.01)])
    with pytest.raises(UserError, match="no pair is left"):
        train(recipe(tmp_path / "two", method="dpo", warm=False, data=file, dpo={"min_gap": 0.5}))


def test_epochs_count_in_steps_and_the_shorter_one_ends_the_training() -> None:
    assert TrainConfig(epochs=3, prompts_per_step=4).resolve_steps(10).steps == 8
    assert TrainConfig(epochs=0.5, prompts_per_step=4).resolve_steps(10).steps == 2
    assert TrainConfig(epochs=3, steps=2, prompts_per_step=4).resolve_steps(10).steps == 2
    assert TrainConfig(steps=7).resolve_steps(10).steps == 7
    assert TrainConfig.model_validate(TrainConfig(epochs=3).model_dump()).resolve_steps(16).steps == 3, "as resumed"


def replies(rewards: list[float | None]) -> list[Rollout]:
    """Sampled replies of one group with these rewards."""
    policy, task = tiny_policy(max_tokens=5)
    group = []
    for number, reward in enumerate(rewards):
        conversation = Conversation(task.rows("train")[0], seed=number)
        asyncio.run(play_episode(conversation, policy, None, 1))
        total = Score.missing("timeout") if reward is None else Score(reward)
        group.append(Rollout(conversation, reward=Reward(total), credit=credit_sampled(total, conversation.mask)))
    return group


def test_online_dpo_pairs_the_best_with_the_worst() -> None:
    group = replies([0.3, None, 0.9, 0.1])
    ((best, worst),), left_out = online_dpo.best_and_worst([group], min_gap=0.5)
    assert (best, worst) == (group[2], group[3]) and not left_out
    pairs, left_out = online_dpo.best_and_worst(
        [group, replies([0.5, None]), replies([0.5, 0.5]), [group[0], group[0]], []], min_gap=0.9
    )
    assert pairs == [] and left_out == {"gap": 3, "missing": 2}


def test_online_dpo_trains_the_sampled_ids() -> None:
    group = replies([0.0, 1.0])
    own = learner(lr=0.01)
    own.keep_reference()
    seen: list[list[int]] = []
    forward_backward = own.forward_backward

    def spy(units: Any, objective: Any) -> dict[str, float]:
        seen.extend(d.ids for unit in units for d in unit)
        return forward_backward(units, objective)

    own.forward_backward = spy  # type: ignore[method-assign]
    logs = rl.learn(own, [group], 0, online_dpo.prepare)
    assert logs["train/pairs"] == 1 and seen == [group[1].conversation.ids, group[0].conversation.ids]
    assert rl.learn(own, [replies([0.5, 0.5])], 0, online_dpo.prepare)["train/pairs"] == 0


def test_ppo_gives_the_penalty_everywhere_and_the_reward_at_the_end() -> None:
    own = learner(value_head=True, kl=0.1, ppo={"whiten": False, "gamma": 1.0, "gae_lambda": 1.0})
    own.keep_reference()
    data = [Datum([7, 8, 9, 10], [0, 1, 1, 1])]
    (reference,) = own.logprobs(data, reference=True)
    data[0].old = [r + x for r, x in zip(reference, (0, 0.5, -1.0, 2.0), strict=True)]
    ppo.estimate(own, data, [[0.0, 0.0, 3.0]])
    assert data[0].advantages == pytest.approx([0, 2.85, 2.9, 2.8], abs=1e-6)


def test_ppo_gives_rewards_where_the_credit_places_them() -> None:
    spans = (Span(2, 4, ("main", "classmate")), Span(4, 6), Span(6, 7, ()), Span(7, 8, ("lost",)))
    credit = Credit({"main": Score(1.0), "classmate": Score(0.5), "lost": Score.missing("timeout")}, spans)
    earned = ppo.earnings(credit)
    assert earned == [(spans[0], 1.5), (spans[1], 1.0)], "no parts, or a missing one: nothing is earned"
    assert ppo.token_rewards(earned) == [0, 0.5, 0, 1.0]


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(-5, 5)), min_size=1, max_size=5))
def test_without_values_and_discount_ppos_advantage_is_what_the_span_earned(spans: list[tuple[int, float]]) -> None:
    earned, at = [], 0
    for length, value in spans:
        earned.append((Span(at, at + length), value))
        at += length
    rewards = ppo.token_rewards(earned)
    advantages, _ = gae(rewards, [0.0] * len(rewards), gamma=1.0, lam=1.0)
    for span, value in earned:
        assert advantages[span.start : span.stop] == pytest.approx([value] * (span.stop - span.start), abs=1e-9)


def test_ppo_advantages_are_white_and_only_where_something_was_sampled() -> None:
    data = [datum(8, 0), datum(6, 1)]
    ppo.whiten(data)
    found = [a for d in data for a, bit in zip(d.advantages, d.mask, strict=True) if bit]
    assert sum(found) / len(found) == pytest.approx(0, abs=1e-9)
    assert sum(a * a for a in found) / len(found) == pytest.approx(1, abs=1e-6)
    assert all(a == 0 for d in data for a, bit in zip(d.advantages, d.mask, strict=True) if not bit)


def test_ppo_leaves_missing_rewards_out_and_its_values_learn() -> None:
    group = replies([1.0, None, 1.0, 1.0])
    own = learner(value_head=True, lr=0.02, kl=0.0, ppo={"whiten": False})
    logs = [rl.learn(own, [group], 0, ppo.prepare) for _ in range(30)]
    assert logs[0]["train/sequences"] == 3 and logs[0]["value/mean"] == 0
    assert logs[-1]["loss/value"] < 0.2 * logs[0]["loss/value"]
    assert logs[-1]["value/mean"] == pytest.approx(1, abs=0.3), "a reward of 1 is what the head learns to expect"
    assert group[1].advantages == () and len(group[0].advantages) == 1
    assert rl.learn(own, [replies([None])], 0, ppo.prepare) == {"train/sequences": 0.0, "train/tokens": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ppo", "online-dpo"])
def test_the_quickstart_learns_with_other_methods_too(method: str, tmp_path: Path) -> None:
    own = {"ppo": ["train.lr=5e-4"], "online-dpo": ["train.lr=3e-4", "train.group_size=4", "train.dpo.min_gap=0.01"]}
    words = [f"train.method={method}", "train.steps=40", f"run_dir={tmp_path / 'run'}", *own[method]]
    train(load_recipe("quickstart", words).recipe)
    rewards = [line["reward/mean"] for line in metrics(tmp_path / "run") if line["phase"] == method]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.08


ALGORITHMS: dict[str, dict[str, Any]] = {
    "reinforce++": {"advantage": "reinforce++", "loss": "clipped", "kl": {"weight": 0.01, "where": "reward"}},
    "gspo": {"loss": "gspo", "length_norm": "sequence", "clip": {"low": 3e-4, "high": 4e-4}},
    "cispo": {"loss": "cispo", "clip": {"high": 0.3}},
    "reinforce": {"loss": "reinforce", "entropy": 0.01},
    "dapo": {"clip": {"high": 0.28}, "dynamic_sampling": 1, "length_norm": "token"},
    "truncated": {"importance": {"rule": "truncate", "high": 2.0}, "kl": {"weight": 0.01, "estimator": "k3-corrected"}},
    "masked": {
        "importance": {"rule": "mask", "level": "sequence", "low": 0.5},
        "advantage": {"name": "grpo", "scale": "step"},
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_from_a_group(name: str) -> None:
    own = learner(lr=0.01, **ALGORITHMS[name])
    if own.config.kl.weight:
        own.keep_reference()
    before = [p.detach().clone() for p in own.parameters]
    logs = rl.learn(own, [replies([0.0, 1.0, None, 1.0])], 0, rl.prepare)
    assert logs["train/sequences"] == 3 and logs["train/grad_norm"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, own.parameters, strict=True))
    if own.config.importance.rule != "none":
        assert logs["policy/importance"] == pytest.approx(1, abs=1e-3), "sampler and learner are one model here"
        assert logs["policy/ratio"] == pytest.approx(1, abs=1e-6), "the ratio is to the learner's own"


def test_an_unknown_surrogate_is_named_before_anything_is_played(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown surrogate 'gpso'.*did you mean 'gspo'"):
        train(recipe(tmp_path / "run", warm=False, loss="gpso"))
