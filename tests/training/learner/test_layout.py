"""Sequences as flat tokens: the tree keeps every sequence, counts shared tokens once, and knows when sharing pays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from upshot.training.learner.batch import (
    Datum,
    end_to_end,
    micro_batches,
    pack,
    shared_tokens,
    tree,
    worth_sharing,
)

families = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.lists(st.integers(0, 2), max_size=12)), min_size=1, max_size=12
)
"""Sequences by shared beginning, its length, and what follows."""


def spelled(family: int, begun: int, rest: list[int]) -> list[int]:
    return [*[(family * 7 + i) % 5 for i in range(begun)], *rest, 9]


@given(families, st.integers(1, 16))
def test_a_tree_contains_every_sequence_and_nothing_twice_in_a_block(
    rows: list[tuple[int, int, list[int]]], block: int
) -> None:
    sequences = [np.array(spelled(*row), dtype=np.int32) for row in rows]
    layout = tree(sequences, block)
    flat = np.full(layout.tokens, -1)
    for ids, path in zip(sequences, layout.paths, strict=True):
        places = layout.places(path)
        assert len(places) == len(ids)
        assert np.isin(flat[places], [-1, *ids]).all()
        flat[places] = ids
    for ids, path in zip(sequences, layout.paths, strict=True):
        assert (flat[layout.places(path)] == ids).all(), "nobody wrote over another's tokens"
        assert all(layout.segments[b].parent == a for a, b in pairwise(path))
    whole = {ids[: i + block].tobytes() for ids in sequences for i in range(0, len(ids) - block + 1, block)}
    tails = sum(len(ids) % block for ids in sequences)
    assert layout.tokens == block * len(whole) + tails
    assert all(segment.parent < i for i, segment in enumerate(layout.segments))


@given(families)
def test_shared_tokens_are_those_of_the_tree(rows: list[tuple[int, int, list[int]]]) -> None:
    sequences = [np.array(spelled(*row), dtype=np.int32) for row in rows]
    assert shared_tokens(sequences) == tree(sequences).tokens


@given(families, st.integers(1, 200))
def test_micro_batches_count_a_shared_beginning_once(rows: list[tuple[int, int, list[int]]], budget: int) -> None:
    data = [Datum(spelled(*row), [1] * len(spelled(*row))) for row in rows]
    units = [data[i : i + 2] for i in range(0, len(data), 2)]
    bins = micro_batches(units, budget, share=True)
    assert sorted(map(id, (d for own in bins for d in own))) == sorted(map(id, data)), "every datum once"
    for own in bins:
        alone = any(unit[0] is own[0] and len(unit) == len(own) for unit in units)
        assert pack(own, "cpu", share=True).layout.tokens <= budget or alone


def test_the_replies_to_one_prompt_are_in_one_micro_batch() -> None:
    prompts = [[n] * 64 for n in range(4)]
    data = [Datum([*prompts[i % 4], 10 + i, 30 + i], [0] * 64 + [1, 1]) for i in range(12)]
    bins = micro_batches([[d] for d in data], token_budget=64 + 3 * 2, share=True)
    assert [{d.ids[0] for d in own} for own in bins] == [{0}, {1}, {2}, {3}]
    assert sum(len(pack(own, "cpu", share=True).ids) for own in bins) == 4 * (64 + 6), "not 12 × 66"


def test_replies_to_one_prompt_are_not_split_where_a_bin_is_half_full() -> None:
    """In two micro-batches, their prompt would be computed twice."""

    def group(number: int, replies: int) -> list[list[Datum]]:
        ids = [[number] * 64 + [100 + reply] * 16 for reply in range(replies)]
        return [[Datum(each, [0] * 64 + [1] * 16)] for each in ids]

    units = [*group(0, 6), *group(1, 6), *group(2, 6)]  # 160 tokens each
    assert [len(own) for own in micro_batches(units, 300, share=True)] == [6, 6, 6]
    assert [len(own) for own in micro_batches(units, 330, share=True)] == [12, 6]
    first = micro_batches(units, 440, share=True)
    assert [len(own) for own in first] == [12, 6] and pack(first[0], "cpu", share=True).layout.tokens == 320
    assert [len(own) for own in micro_batches([*group(0, 2), *group(1, 20)], 400, share=True)] == [17, 5]


def test_the_turns_of_a_conversation_are_one_line_of_segments() -> None:
    ids = [i % 50 for i in range(70)]
    data = [Datum(ids[:n], [0] * m + [1] * (n - m)) for m, n in ((16, 32), (40, 48), (60, 70))]
    batch = pack(data, "cpu", share=True)
    assert len(batch.ids) == 70
    assert batch.ids[batch.rows].tolist() == [
        i % 50 for m, n in ((16, 32), (40, 48), (60, 70)) for i in range(m - 1, n - 1)
    ]
    assert batch.owner.tolist() == [0] * 16 + [1] * 8 + [2] * 10
    assert batch.positions.tolist() == list(range(70))


def test_sharing_pays_for_long_prompts_and_not_for_short_ones() -> None:
    def group(prompt: int, reply: int) -> list[np.ndarray]:
        return [np.array([*[1] * prompt, *[2 + i] * reply], dtype=np.int32) for i in range(8)]

    assert worth_sharing(group(128, 256))
    assert not worth_sharing(group(16, 1000))
    assert not worth_sharing(group(0, 100))
    assert not worth_sharing([[1] * 40]), "there is nobody to share with"


def test_end_to_end_shares_nothing() -> None:
    layout = end_to_end([3, 1, 2])
    assert [(s.start, s.length, s.parent) for s in layout.segments] == [(0, 3, -1), (3, 1, -1), (4, 2, -1)]
    assert not layout.shares and layout.tokens == 6
