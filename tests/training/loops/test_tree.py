"""Learning along the tree: which replies are compared, what is counted, and how a run trains and resumes.

`test_enumeration.py` checks that it follows the exact gradient.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.enumerated import OPENING, Sampled, Words, worth
from tests.training.workshop import assert_same_steps, learner, metrics, recipe
from upshot.cli import main
from upshot.config.recipe import CreditConfig, Recipe, TrainConfig
from upshot.core.conversation import Conversation, Message, Row, Sample, Turn
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.rewards.credit import MetricWeight
from upshot.rollout.check_names import check_names
from upshot.rollout.credit.rules import measure_tree
from upshot.rollout.futures.talk import Talk
from upshot.rollout.reply import Future, Rollout
from upshot.run.folder import RunFolder
from upshot.run.run import train
from upshot.training.learner.batch import Datum
from upshot.training.loops import online_dpo, ppo, rl
from upshot.training.objectives.objectives import PolicyGradient

ROW = Row("r", (Message("user", "?"),))


def conversation(words: Words) -> Conversation:
    """What a conversation of a policy and a user with these words leaves behind; each word is one token."""
    turns = [Turn(ROW.messages[0])]
    heard = OPENING
    for at, word in enumerate(words):
        if at % 2:
            turns.append(Turn(Message("user", str(word))))
            heard = word
        else:
            turns.append(Turn(Message("assistant", str(word)), Sample((heard,), (word,), (-0.5,), "stop")))
    return Conversation(ROW, turns=tuple(turns))


def future(words: Words, path: tuple[int, ...], forks: tuple[int, ...]) -> Future:
    scores = {"worth": Score(worth(words))}
    return Future(conversation(words), forks[0], "user", scores=scores, path=path, forks=forks)


def scored(reply: Rollout, by: str) -> Rollout:
    talk = Talk({}, {"worth": MetricWeight()}, credit=CreditConfig(by=by))
    reply.reward, reply.credit = talk.score(reply)
    return reply


def test_the_loss_adds_the_futures_to_the_replies_and_changes_nothing_of_theirs() -> None:
    """The gradient of the loss is the sum in the proof: shares count, and only replies divide."""
    teacher = learner(length_norm="constant", advantage="dr-grpo")
    rng = random.Random(0)

    def datum(length: int, **more: object) -> Datum:
        ids = [rng.randrange(7, 50) for _ in range(length)]
        found = Datum(ids, [0] * 3 + [1] * (length - 3), advantages=[rng.gauss(0, 1) for _ in ids], **more)  # type: ignore[arg-type]
        (found.old,) = teacher.logprobs([found])
        return found

    def gradients(units: Sequence[Sequence[Datum]]) -> list[torch.Tensor]:
        teacher.module.zero_grad()
        teacher.forward_backward(units, PolicyGradient(teacher.config))
        return [p.grad.clone() for p in teacher.parameters if p.grad is not None]

    replies = [datum(9), datum(7)]
    below = [datum(12, share=0.25, counted=False), datum(11, share=0.5, counted=False)]
    whole = gradients([[replies[0], *below], [replies[1]]])
    alone = gradients([[reply] for reply in replies])
    added = [torch.zeros_like(g) for g in alone]
    for one in below:
        one.counted, share, one.share = True, one.share, 1.0
        added = [total + share * own / 2 for total, own in zip(added, gradients([[one]]), strict=True)]
    for got, first, second in zip(whole, alone, added, strict=True):
        assert torch.allclose(got, first + second, atol=1e-6)


def silent_reply(values: Mapping[tuple[int, ...], float | None]) -> Rollout:
    words = {0: (0, 0, 0), 1: (0, 1, 1), 2: (0, 0, 1)}
    futures = []
    for path, value in values.items():
        one = future(words[path[0]], path, (2,))
        one.scores = {"worth": Score.missing("timeout") if value is None else Score(value)}
        futures.append(one)
    return scored(Rollout(conversation((0,)), futures=futures), "tree")


def test_branches_that_cannot_be_compared_teach_nothing_and_are_counted() -> None:
    replies = [
        silent_reply({(0,): 1.0, (1,): 0.0}),
        silent_reply({(0,): 1.0, (1,): None}),
        silent_reply({(0,): 0.5, (1,): 0.5}),
        silent_reply({(0,): 1.0, (1,): None, (2,): 0.0}),
    ]
    found = measure_tree(replies)
    assert found == {
        "tree/forks": 4,
        "tree/drawn": 4,
        "tree/branches": 4,
        "tree/missing": 2,
        "tree/alone": 1,
        "tree/flat": 1,
        "tree/unsaid": 0,
    }
    units, _ = rl.training_data(Sampled(advantage="dr-grpo"), [replies])
    below = [datum for datum in itertools.chain(*units) if not datum.counted]
    assert [datum.share for datum in below] == [0.5] * 4, "one over those siblings that have a reward"
    assert [datum.advantages[-1] for datum in below] == [0.5, -0.5] * 2


def test_a_branch_in_which_only_the_user_spoke_is_a_sibling_and_trains_nothing() -> None:
    left = future((0, 1), (0,), (2,))
    said = future((0, 0, 1), (1,), (2,))
    left.scores, said.scores = {"worth": Score(1.0)}, {"worth": Score(0.0)}
    reply = scored(Rollout(conversation((0,)), futures=[left, said]), "tree")
    units, _ = rl.training_data(Sampled(advantage="dr-grpo"), [[reply]])
    (below,) = [datum for datum in itertools.chain(*units) if not datum.counted]
    assert below.mask == [0, 0, 0, 1] and below.advantages[-1] == -0.5


def test_ppo_takes_every_branch_as_a_trajectory_and_online_dpo_pairs_the_siblings() -> None:
    reply = silent_reply({(0,): 1.0, (1,): 0.0})
    teacher = learner(value_head=True, method="ppo")
    (unit,), _ = ppo.training_data(teacher, [[reply]])
    assert [sum(datum.mask) for datum in unit] == [1, 1, 1]
    assert [datum.counted for datum in unit] == [True, False, False]
    assert [datum.returns[datum.places[-1]] for datum in unit] == pytest.approx([0.5, 1.0, 0.0])
    alike = silent_reply({(0,): 1.0, (2,): 0.0})  # whose users said the same
    pairs, left_out = online_dpo.best_and_worst([[alike], *alike.siblings], 0.1)
    ((best, worst),) = pairs
    assert (best.reward.total.value, worst.reward.total.value) == (1.0, 0.0) and left_out == {"missing": 1}


def test_online_dpo_pairs_only_continuations_of_the_same_words() -> None:
    reply = silent_reply({(0,): 1.0, (1,): 0.0})  # whose users said different things
    assert online_dpo.best_and_worst(reply.siblings, 0.1) == ([], {"context": 1})
    three = silent_reply({(0,): 0.5, (1,): 1.0, (2,): 0.0})
    ((best, worst),), left_out = online_dpo.best_and_worst(three.siblings, 0.1)
    assert (best.path, worst.path) == ((0,), (2,)) and not left_out


@pytest.mark.parametrize(("train", "trained"), [({}, 2), ({"kl": 0.1}, 5), ({"entropy": 0.1}, 5)], ids=str)
def test_regularisation_does_not_depend_on_how_rewards_vary(train: dict[str, Any], trained: int) -> None:
    """Branches of flat forks, and one whose siblings are missing, stay in the loss with advantage 0."""
    replies = [
        silent_reply({(0,): 1.0, (1,): 0.0}),
        silent_reply({(0,): 0.5, (1,): 0.5}),
        silent_reply({(0,): 1.0, (1,): None}),
    ]
    source = Sampled(advantage="dr-grpo", **train)
    units, _ = rl.training_data(source, [replies])
    below = [datum for datum in itertools.chain(*units) if not datum.counted]
    assert len(below) == trained and [datum.advantages[-1] for datum in below[2:]] == [0.0] * (trained - 2)
    assert measure_tree(replies, source.config.trains_every_fork)["tree/branches"] == trained


def test_a_divergence_subtracted_from_the_reward_distinguishes_equal_branches() -> None:
    class Reference(Sampled):
        def logprobs(self, data: Sequence[Datum], reference: bool = False) -> list[list[float]]:
            return [[-float(datum.ids[-1])] * len(datum.ids) for datum in data]

    reply = silent_reply({(0,): 0.5, (1,): 0.5})
    source = Reference(advantage="dr-grpo", kl={"weight": 1.0, "where": "reward"})
    units, _ = rl.training_data(source, [[reply]])
    first, second = [datum for datum in itertools.chain(*units) if not datum.counted]
    assert first.advantages[-1] == -second.advantages[-1] != 0


def test_the_tree_is_measured_as_it_is_trained() -> None:
    replies = [silent_reply({(0,): 0.5, (1,): 0.5}), silent_reply({(0,): 1.0, (1,): None})]
    assert measure_tree(replies)["tree/branches"] == 0 and measure_tree(replies)["tree/flat"] == 1
    found = measure_tree(replies, TrainConfig(method="ppo").trains_every_fork)
    assert found["tree/branches"] == 3 and found["tree/flat"] == found["tree/alone"] == 0
    replies[0].siblings = []  # not drawn
    found = measure_tree(replies)
    assert found["tree/forks"] == 2 and found["tree/drawn"] == 1


def along_the_tree(folder: Path, **changes: object) -> Recipe:
    """A talkative user, and a reward that distinguishes all futures."""
    more = {
        "credit": "tree",
        "models": {"user": "scripted:tests.training.helpers:customer"},
        "futures": {"samples": [2, 2], "rounds": 2, "user": {"name": "llm"}},
        "reward": {"metrics": ["tests.training.helpers:Lottery"]},
    }
    return recipe(folder, warm=False, more=more, **changes)


@pytest.mark.parametrize("method", ["rl", "ppo", "online-dpo"])
def test_every_method_trains_along_the_tree(tmp_path: Path, method: str) -> None:
    train(along_the_tree(tmp_path / "run", method=method, steps=1, minibatches=2))
    last = metrics(tmp_path / "run")[-1]
    assert (last["tree/forks"], last["tree/branches"] + 2 * last["tree/flat"]) == (12 * 3, 12 * 6)
    line = json.loads((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()[0])
    assert [one["path"] for one in line["futures"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    first, second = (one["branches"] for one in line["futures"][:2])
    assert first[0] == second[0] and first[1]["start"] == second[1]["start"] == first[0]["start"] + 2
    if method != "online-dpo":
        assert first[1]["advantage"] != second[1]["advantage"]
    kept = RunFolder(tmp_path / "run").samples(1)
    for future in line["futures"]:
        said = [message["tokens"] for message in future["messages"] if "tokens" in message]
        assert [len(sample.ids) for sample in kept[future["key"]]] == said
        spans = [span for branch in future["branches"] for span in branch["spans"]]
        assert [stop - start for start, stop, _ in spans] == said


def test_a_run_along_the_tree_resumes_exactly(tmp_path: Path) -> None:
    for name in ("whole", "halves"):
        train(along_the_tree(tmp_path / name, steps=2 if name == "whole" else 1))
    assert main(["train", "--quiet", "--resume", str(tmp_path / "halves"), "train.steps=2"]) == 0
    assert_same_steps(metrics(tmp_path / "whole"), metrics(tmp_path / "halves"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"futures": {"samples": [2, 2], "rounds": 1}}, "as many rounds, or fewer forks"),
        ({"credit": "tree", "futures": {"samples": 1, "rounds": 1}}, "set 2 or more"),
    ],
)
def test_a_tree_that_could_teach_nothing_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_names(recipe(tmp_path, more=changes))
