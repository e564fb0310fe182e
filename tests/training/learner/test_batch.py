"""The learner's input: flat tokens, units that stay together, the token budget, the sampled ids."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tiny_policy
from upshot.core.conversation import Conversation, Message, Row, Sample, Turn
from upshot.core.score import Score
from upshot.rewards.credit import Credit, Span, credit_sampled, credit_turns
from upshot.rollout.episode import play_episode
from upshot.rollout.reply import Rollout
from upshot.training.learner.batch import Datum, data_of, micro_batches, pack, unpack

lengths = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=2), min_size=1, max_size=20)


@given(lengths, st.integers(1, 200))
def test_micro_batches_contain_all_units_unsplit_and_within_the_budget(sizes: list[list[int]], budget: int) -> None:
    units = [[Datum([7] * n, [1] * n) for n in unit] for unit in sizes]
    bins = micro_batches(units, budget)
    places = {id(d): (b, i) for b, own in enumerate(bins) for i, d in enumerate(own)}
    assert len(places) == sum(map(len, units)) == sum(map(len, bins)), "every datum once"
    for unit in units:
        first = places[id(unit[0])]
        assert [places[id(d)] for d in unit] == [(first[0], first[1] + i) for i in range(len(unit))]
    for own in bins:
        tokens = sum(len(d.ids) for d in own)
        alone = len(own) == 1 or any(len(own) == len(unit) and unit[0] is own[0] for unit in units)
        assert tokens <= budget or alone


def test_sequences_lie_end_to_end_and_every_trained_token_knows_where_it_is_predicted() -> None:
    data = [Datum([5, 6, 7], [0, 1, 1], [0.0, -1.0, -2.0]), Datum([8, 9], [1, 1], [-3.0, -4.0])]
    batch = pack(data, "cpu")
    assert batch.ids.tolist() == [5, 6, 7, 8, 9] and batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.rows.tolist() == [0, 1, 3] and batch.targets.tolist() == [6, 7, 9], "nothing predicts a first token"
    assert batch.owner.tolist() == [0, 0, 1] and batch.counts().tolist() == [2, 1]
    assert set(batch.columns) == {"old"} and batch.columns["old"].tolist() == [-1, -2, -4]
    assert batch.sums(batch.columns["old"]).tolist() == [-3, -4]
    assert unpack(data, batch.columns["old"]) == [[0, -1, -2], [0, -4]]


def test_a_datum_holds_the_sampled_ids_and_advantages_of_its_spans() -> None:
    policy, task = tiny_policy(max_tokens=5)
    conversation = Conversation(task.rows("train")[0], seed=1)
    asyncio.run(play_episode(conversation, policy, None, 1))
    reply = Rollout(conversation, credit=credit_sampled(Score(1.0), conversation.mask))
    reply.advantages = [0.25]
    (datum,) = data_of(reply)
    (sample,) = conversation.samples()
    assert datum.ids == [*sample.context, *sample.ids]
    assert [i for i, bit in zip(datum.ids, datum.mask, strict=True) if bit] == list(sample.ids)
    assert datum.advantages == [0.25 * bit for bit in datum.mask]
    assert datum.old[len(sample.context) :] == list(sample.logprobs)
    reply.advantages = [None]
    assert data_of(reply) == [], "a reply that left the statistics leaves the loss"


def test_a_span_without_an_advantage_is_masked_and_the_rest_of_its_reply_is_trained() -> None:
    sample = Sample((1, 2), (3, 4, 5, 6), (-1.0,) * 4, "stop")
    conversation = Conversation(Row("r", ()), turns=(Turn(Message("assistant", ""), sample),))
    spans = (Span(2, 4, ("main", "classmate")), Span(4, 6))
    credit = Credit({"main": Score(1.0), "classmate": Score.missing("timeout")}, spans)
    (datum,) = data_of(Rollout(conversation, credit=credit, advantages=[None, 0.5]))
    assert datum.mask == [0, 0, 0, 0, 1, 1] and datum.advantages == [0, 0, 0, 0, 0.5, 0.5]


def test_every_turn_may_be_a_sample_of_its_own() -> None:
    samples = [Sample((1,), (2, 3), (-1.0,) * 2, "stop"), Sample((4,), (5,), (-2.0,), "stop")]
    turns = tuple(Turn(Message("assistant", ""), sample) for sample in samples)
    conversation = Conversation(Row("r", ()), turns=turns)
    credit = credit_turns([Score(1.0), Score(0.0)], conversation, 1.0, split=True)
    first, second = data_of(Rollout(conversation, credit=credit, advantages=[0.5, -0.5]))
    assert (first.ids, first.mask, first.advantages) == ([1, 2, 3], [0, 1, 1], [0, 0.5, 0.5])
    assert (second.ids, second.mask) == ([1, 2, 3, 4, 5], [0, 0, 0, 0, 1])
    assert second.old[-1] == -2.0 and second.advantages[-1] == -0.5
