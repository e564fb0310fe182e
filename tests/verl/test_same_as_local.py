"""With the same recipe and the same replies, local mode and verl mode play and compute the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.rollout import test_blame as blamed
from tests.verl.test_worker import RENDERER, Manager, Output
from upshot.config.load import load_recipe
from upshot.config.recipe import CreditConfig, Recipe, TrainConfig
from upshot.core.conversation import Conversation, Message, Row, Sample
from upshot.core.score import Score
from upshot.models.base import Abilities, Completion, Model, ModelCallError, Request
from upshot.models.rendering import Renderer
from upshot.models.tiny import tiny_tokenizer
from upshot.rewards.credit import Credit, MetricWeight, Reward, Span, credit_turns, restrict_to
from upshot.rollout.blame import blame
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import count_earlier, play_step
from upshot.rollout.reply import Rollout
from upshot.rollout.services import build_context, build_services
from upshot.tasks.base import tasks
from upshot.tasks.ciphers import Ciphers
from upshot.training.learner.batch import Datum, pack
from upshot.training.learner.distributed.pickling import dumps, loads
from upshot.training.loops import ppo, rl
from upshot.training.loops.sft import Sft
from upshot.training.objectives.objectives import normalise
from upshot.training.setup import sampling_of
from upshot.verl.rows import record_of
from upshot.verl.served import ConversationLink
from upshot.verl.train_batch import BatchRow as TrainedRow
from upshot.verl.train_batch import LearnerInputs, teach
from upshot.verl.trajectory import Trajectory, places_of, trajectories_of
from upshot.verl.worker import PlayRequest, RolloutWorker, describe_place

DOWN = "down"
Says = Callable[[list[int], int], str]
"""What the policy says after a prompt, by seed."""


def words(prompt: list[int], seed: int) -> str:
    """One of a few replies, by seed; sometimes no reply at all."""
    said = ["which size ?", "which colour and thing ?", "here is a tiny red lamp", "here is a small blue bowl", DOWN]
    return said[seed % len(said)]


def chats(prompt: list[int], seed: int) -> str:
    """The same, but rarely no reply: a tree has many of them."""
    return words(prompt, seed) if seed % 3 else words(prompt, seed % 4)


class Local(Model):
    """The policy in this process."""

    name = "fixed"
    abilities = Abilities(ids_in=True, ids_out=True)

    def __init__(self, says: Says, renderer: Renderer = RENDERER) -> None:
        self.says, self.renderer = says, renderer

    async def generate(self, request: Request) -> list[Completion]:
        text = self.says(list(request.prompt), request.sampling.seed or 0)  # type: ignore[arg-type]
        if text == DOWN:
            raise ModelCallError("aborted", "a server gave 0 ids (stop reason 'aborted')")
        ids = tuple(self.renderer.render_reply(text))
        return [Completion(text, "stop", ids, (-0.5,) * len(ids))]


class Servers(Manager):
    """The same policy on a cluster's servers."""

    def __init__(self, says: Says, renderer: Renderer = RENDERER) -> None:
        super().__init__(str, renderer.tokenizer)
        self.by_seed, self.renderer = says, renderer

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Output:
        text = self.by_seed(prompt_ids, sampling_params["seed"])
        if text == DOWN:
            return Output([], [], "aborted")
        ids = self.renderer.render_reply(text)
        return Output(ids, [-0.5] * len(ids))


def recipe_of(*overrides: str) -> Recipe:
    own = ["task.rows_per_split=64", "task.vague=0", "warm_start=null", "model.path=/model", "train.group_size=4"]
    return load_recipe("quickstart", ["credit.by=reply", *own, *overrides]).recipe


def some(recipe: Recipe, *places: int) -> list[Row]:
    """Rows of the recipe's task."""
    rows = tasks.create(recipe.task.name, recipe.task.options, "task").rows("train")
    return [rows[place] for place in places]


@cache
def _ciphers() -> Renderer:
    return Renderer(tiny_tokenizer(Ciphers().vocabulary()))


def renderer_of(recipe: Recipe) -> Renderer:
    """A renderer for the task's own words."""
    return RENDERER if recipe.task.name == "slots" else _ciphers()


def locally(recipe: Recipe, rows: Sequence[Row], step: int, says: Says = words) -> list[list[Rollout]]:
    """The groups of a step as local mode plays them."""
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    renderer = renderer_of(recipe)
    model = Local(says, renderer)
    services = build_services(recipe, task, model, renderer.tokenizer, renderer)
    context = build_context(
        recipe, services, Policy(model, renderer, sampling_of(recipe), 256, think=recipe.episode.think)
    )
    return asyncio.run(play_step(context, rows, recipe.train.group_size, rl.derive_seed(recipe.seed, "step", step)))


def on_verl(recipe: Recipe, rows: Sequence[Row], step: int, says: Says = words) -> list[list[Rollout]]:
    """The same groups, played by a worker of the cluster and read by the trainer."""
    renderer = renderer_of(recipe)
    worker, servers = RolloutWorker(recipe, renderer.tokenizer, 256), Servers(says, renderer)
    before = count_earlier([row.id for row in rows])

    async def one(group: int, session: int) -> Rollout:
        record = record_of(rows[group], 0, "train")
        info = describe_place(record["extra_info"], group, before[group])
        line = ConversationLink(servers, f"{group}.{session}", seeded=True)
        return loads(dumps(await worker.play(PlayRequest(info, session, step), line)))

    async def all_of_them() -> list[list[Rollout]]:
        return [
            list(await asyncio.gather(*(one(group, session) for session in range(recipe.train.group_size))))
            for group in range(len(rows))
        ]

    return asyncio.run(all_of_them())


def number(ids: Sequence[int], place: int) -> float:
    """A number for a token that depends on everything before it, as a log-probability does."""
    return -math.fmod(0.37 * sum(ids[: place + 1]) + place, 1.9) / 3


class Learner:
    """Local mode's learner, as far as it is used here."""

    def __init__(self, recipe: Recipe) -> None:
        self.config = recipe.train

    def logprobs(self, data: Sequence[Datum], reference: bool = False) -> list[list[float]]:
        return [self._of(datum, -0.11 if reference else 0.0) for datum in data]

    def values(self, data: Sequence[Datum]) -> list[list[float]]:
        return [self._of(datum, 0.9) for datum in data]

    def _of(self, datum: Datum, more: float) -> list[float]:
        return [number(datum.ids, at) + more if bit else 0.0 for at, bit in enumerate(datum.mask)]


def taught(recipe: Recipe, groups: Sequence[Sequence[Rollout]]) -> list[tuple[Rollout, Trajectory, LearnerInputs]]:
    """What verl's learner receives for every row that has something to learn from."""
    given, rows = given_rows(groups, recipe.train.trains_every_fork)
    told, _ = teach(recipe.train, groups, given)
    return [(*pair, one) for pair, one in zip(rows, told, strict=True)]


def given_rows(
    groups: Sequence[Sequence[Rollout]], alone: bool = False
) -> tuple[list[TrainedRow], list[tuple[Rollout, Trajectory]]]:
    """The rows of a step with what verl would compute of them."""
    replies = [reply for group in groups for reply in group]
    rows = [(reply, row) for reply in replies for row in trajectories_of(reply, 0, alone) if any(row.response_mask)]
    places = [place for reply in replies for place in places_of(reply, alone)]
    given = []
    for place, (_, row) in zip(places, rows, strict=True):
        ids = [*row.prompt_ids, *row.response_ids]
        found = [number(ids, at) for at in range(len(row.prompt_ids), len(ids))]
        more = [[value + by for value in found] for by in (0.0, -0.11, 0.9)]
        given.append(TrainedRow(place.source, len(ids), *more))
    return given, rows


def local_data(recipe: Recipe, groups: Sequence[Sequence[Rollout]]) -> list[Datum]:
    """What local mode's learner learns from."""
    method = ppo if recipe.train.method == "ppo" else rl
    return [datum for unit in method.training_data(Learner(recipe), groups)[0] for datum in unit]


def same(recipe: Recipe, local: Sequence[Sequence[Rollout]], verl: Sequence[Sequence[Rollout]]) -> int:
    """Check that both learn the same; returns the number of rows."""
    data = local_data(recipe, local)
    rows = taught(recipe, verl)
    assert len(data) == len(rows)
    for datum, (_, row, told) in zip(data, rows, strict=True):
        first = len(row.prompt_ids)
        assert [*row.prompt_ids, *row.response_ids] == list(datum.ids)
        assert told.mask == list(datum.mask)[first:] == row.response_mask
        for name in ("advantages", "old", "returns", "weights"):
            assert getattr(told, name) == pytest.approx(list(getattr(datum, name))[first:]), name
    expected = local_gradients(recipe, data)
    assert gradients(recipe, [told for *_, told in rows]) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    return len(rows)


def gradients(recipe: Recipe, told: Sequence[LearnerInputs]) -> list[float]:
    """What verl's mean makes of a step's advantages, token by token (its `agg_loss`, if a ratio is 1)."""
    tokens = sum(sum(one.mask) for one in told)
    by = {"token": lambda own: tokens, "sequence": lambda own: len(told) * sum(own.mask)}
    by["constant"] = lambda own: len(told) * recipe.episode.max_tokens
    divide = by[recipe.train.length_norm]
    return [a / divide(one) for one in told for a, bit in zip(one.scaled, one.mask, strict=True) if bit]


def local_gradients(recipe: Recipe, data: Sequence[Datum]) -> list[float]:
    """What local mode's objective makes of them."""
    batch, objective = pack(data, "cpu"), Sft()
    objective.begin(data, recipe.episode.max_tokens, recipe.train.length_norm)
    weight = torch.zeros(len(batch.owner), requires_grad=True)
    normalise(weight * batch.columns["advantages"], batch, objective.by).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return list(weight.grad.tolist())


def compare(recipe: Recipe, step: int = 3, says: Says = words) -> int:
    """Play a step in both modes and check that they are the same."""
    rows = some(recipe, 3, 9, 5, 9)  # one row is in the step twice
    local, verl = locally(recipe, rows, step, says), on_verl(recipe, rows, step, says)
    for one, other in zip(local, verl, strict=True):
        assert [r.to_dict(step) for r in one] == [r.to_dict(step) for r in other]
    assert any(r.reward.total.is_missing for group in local for r in group)
    count = same(recipe, local, verl)
    for one, other in zip(local, verl, strict=True):
        assert [r.advantages for r in one] == [r.advantages for r in other]
    return count


@pytest.mark.parametrize("name", ["dr-grpo", "grpo", "rloo", "gdpo", "separated", "reinforce++"])
def test_a_step_has_the_same_conversations_rewards_parts_and_advantages(name: str) -> None:
    assert compare(recipe_of(f"train.advantage={name}")) > 4


@pytest.mark.parametrize(
    "more",
    [
        ["train.length_norm=token"],
        ["train.length_norm=sequence", "train.advantage=grpo"],
        ["train.length_norm=constant", "train.importance=truncate", "train.importance.high=1.02"],
        ["futures.samples=[2,2]", "credit.forks=0.5", "train.advantage=rloo"],
        ["train.kl=0.1", "train.kl.where=reward"],
        ["train.method=ppo", "train.kl=0.05"],
    ],
    ids=" ".join,
)
def test_turns_in_futures_are_learned_along_the_tree_as_in_local_mode(more: list[str]) -> None:
    recipe = recipe_of("credit.by=tree", *more)
    count = compare(recipe, says=chats)
    groups = on_verl(recipe, some(recipe, 3, 9, 5, 9), 3, chats)
    told = taught(recipe, groups)
    branches = [branch for group in groups for reply in group for fork in reply.siblings for branch in fork]
    assert count > sum(len(group) for group in groups) and any(branch.advantages for branch in branches)
    assert len({round(one.scale, 6) for *_, one in told}) > 1, "a branch counts for less than a reply"


def thinks(prompt: list[int], seed: int) -> str:
    """A reply with a thought, without one, or no reply at all, by seed."""
    said = ["<think> 4 + 3 = 7 . </think> #### 7", "<think> 2 + 3 = 5 . </think> #### 5", "#### 7", DOWN]
    return said[seed % len(said)]


def peer(request: Request) -> str:
    """A classmate with one of two answers, which sometimes fails."""
    seed = request.sampling.seed or 0
    if seed % 5 == 0:
        raise ModelCallError("refused")
    return f"#### {seed % 11}"


@pytest.mark.parametrize("name", ["dr-grpo", "gdpo", "{name: separated, non_negative: true}"])
def test_classmates_of_a_step_are_those_of_local_mode(name: str) -> None:
    own = [f"models.peer=scripted:{__name__}:peer", "models.monitor=scripted:echo", "eval.monitor=null"]
    more = ["warm_start=null", "model.path=/model", "train.group_size=6", "task.limit=16", f"train.advantage={name}"]
    recipe = load_recipe("classmate-mini", [*own, *more]).recipe
    assert compare(recipe, says=thinks) > 8
    parts = {span.parts for r in on_verl(recipe, some(recipe, 3), 3, thinks)[0] if r.credit for span in r.credit.spans}
    assert ("main",) in parts and any("classmate" in own for own in parts)


@pytest.mark.parametrize(
    "more",
    [
        ["train.importance=truncate", "train.importance.high=1.02"],
        ["train.importance=mask", "train.importance.level=sequence", "train.importance.low=0.9"],
        ["train.kl=0.1", "train.kl.where=reward"],
        ["train.method=ppo", "train.kl=0.05"],
        ["train.method=ppo", "train.ppo.gamma=0.9", "train.ppo.whiten=false"],
    ],
    ids=" ".join,
)
def test_importance_divergence_and_values_are_those_of_local_mode(more: list[str]) -> None:
    assert compare(recipe_of(*more)) > 4


def test_entropy_and_drift_are_of_the_trained_tokens_as_local_mode_counts_them() -> None:
    recipe = recipe_of("train.importance=none")
    groups = on_verl(recipe, some(recipe, 3, 9), 3)
    rows, _ = given_rows(groups)
    told, logs = teach(recipe.train, groups, rows)
    pairs = [
        (now, old)
        for row, one in zip(rows, told, strict=True)
        for now, old, bit in zip(row.logprobs, one.old, one.mask, strict=True)
        if bit
    ]
    assert len(pairs) == logs["train/tokens"] > 0
    assert logs["policy/entropy"] == pytest.approx(-sum(now for now, _ in pairs) / len(pairs))
    assert logs["policy/drift"] == pytest.approx(sum(abs(now - old) for now, old in pairs) / len(pairs))
    assert logs["policy/drift_max"] == pytest.approx(max(abs(now - old) for now, old in pairs))
    exact = [replace(row, entropy=[2.0] * len(row.logprobs)) for row in rows]
    assert teach(recipe.train, groups, exact)[1]["policy/entropy"] == 2.0, "with a bonus for it, of the distribution"


def talked(rewards: list[list[Score]], split: bool, tokens: str = "all") -> list[list[Rollout]]:
    """A group of episodes; each turn has three sampled tokens, two of them a thought, and one of context."""
    group = []
    for at, own in enumerate(rewards):
        talk = Conversation(Row("r", (Message("user", "?"),)), key=f"r#{at}")
        for turn in range(len(own)):
            context = (1, 2, 3) if turn == 0 else (4,)
            sample = Sample(context, (7, 8, 9 + at), (-1.0, -0.5, -0.2), "stop", thought=(0, 2), answer=2)
            talk.say(Message("assistant", "x"), sample)
        credit = credit_turns(own, talk, 0.5, split)
        credit = replace(credit, spans=restrict_to(credit.spans, talk, tokens))
        group.append(Rollout(talk, reward=Reward(own[-1]), credit=credit))
    return [group]


LOST = Score.missing("timeout")
TURNS = [[Score(0.0), Score(1.0)], [Score(0.5), Score(0.0)], [LOST, Score(2.0)], [Score(1.0), LOST], [Score(1.0)]]


@pytest.mark.parametrize("name", ["grpo", "gdpo", "rloo"])
@pytest.mark.parametrize(("split", "tokens"), [(False, "all"), (True, "all"), (True, "answer"), (False, "thought")])
def test_turns_are_credited_as_in_local_mode_also_where_one_is_missing(name: str, split: bool, tokens: str) -> None:
    recipe = recipe_of(f"train.advantage={name}")
    count = same(recipe, talked(TURNS, split, tokens), talked(TURNS, split, tokens))
    assert count == (6 if split else 4)  # the fourth reply's last turn is missing, and with it its first


def test_a_later_turn_is_trained_where_an_earlier_one_is_missing() -> None:
    lost = talked([[LOST, Score(1.0)]], False)[0][0]
    (row,) = trajectories_of(lost, 0)
    assert row.prompt_ids == [1, 2, 3] and row.response_mask == [0, 0, 0, 0, 1, 1, 1]


def test_turns_as_samples_of_their_own_are_rows_of_their_own() -> None:
    both = talked([[Score(0.0), Score(1.0)]], True)[0][0]
    first, second = trajectories_of(both, 0)
    assert first.response_ids == [7, 8, 9] and first.response_mask == [1, 1, 1]
    assert second.response_ids == [7, 8, 9, 4, 7, 8, 9] and second.response_mask == [0, 0, 0, 0, 1, 1, 1]


def with_parts(reply: Rollout, number: int) -> Rollout:
    """The reply with a classmate's part on its first two tokens, which is sometimes missing."""
    if reply.credit is None or not reply.credit.spans:
        return reply
    own, (span, *rest) = reply.credit.parts, reply.credit.spans
    part = Score.missing("timeout") if number % 3 == 0 else Score(0.1 * number)
    spans = (Span(span.start, span.start + 2, (*span.parts, "classmate")), Span(span.start + 2, span.stop, span.parts))
    reply.credit = Credit({**own, "classmate": part}, (*spans, *rest), reply.credit.split)
    return reply


@pytest.mark.parametrize("name", ["grpo", "gdpo", "separated"])
def test_several_parts_of_a_turn_are_compared_each_with_its_own(name: str) -> None:
    recipe = recipe_of(f"train.advantage={name}")
    rows = some(recipe, 3, 9)
    local, verl = locally(recipe, rows, 0), on_verl(recipe, rows, 0)
    for groups in (local, verl):
        for at, reply in enumerate(reply for group in groups for reply in group):
            with_parts(reply, at)
    assert same(recipe, local, verl) > 2


def test_the_lone_survivor_of_a_group_gets_zero_and_not_its_raw_score() -> None:
    recipe = recipe_of("train.group_size=2")
    turns = iter([DOWN, *["here is a tiny red lamp"] * 9])
    groups = on_verl(recipe, some(recipe, 3), 0, lambda prompt, seed: next(turns))
    assert [r.reward.total.is_missing for r in groups[0]] == [True, False]
    ((_, row, told),) = taught(recipe, groups)
    assert any(row.response_mask) and set(told.advantages) == {0.0}


def test_replies_the_policy_made_missing_have_rows_and_count_as_the_worst_of_the_step() -> None:
    along = CreditConfig(by="tree")
    group = [blamed.reply(blamed.RIGHT, blamed.ESCAPE, by="tree"), blamed.reply(blamed.WRONG, blamed.RIGHT, by="tree")]
    group += [blamed.reply(blamed.ESCAPE, blamed.ESCAPE, by="tree")]
    sent = [place for reply in group for place in places_of(reply, maybe=True)]
    assert len(sent) == 9 and len([place for reply in group for place in places_of(reply)]) == 4
    blame([group], Talk({}, {"m": MetricWeight()}, credit=along))
    trained = {(id(place.source), place.stop) for reply in group for place in places_of(reply)}
    rows = [TrainedRow(one.source, one.stop, [-0.5]) for one in sent if (id(one.source), one.stop) in trained]
    told, _ = teach(TrainConfig.model_validate({"advantage": "rloo"}), [group], rows)
    assert [one.advantages for one in told] == [[0.25], [1.0], [-1.0], [0.25], [-1.0], [1.0], [-0.5]]
