"""Where a model thinks: markers that are one token, several, split over tokens, unclosed, unopened, absent or
repeated."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.templates import byte_tokenizer
from upshot.core.thought import MARKERS, Thought, find_thought, split_thought
from upshot.models.rendering import Renderer

HEADINGS = ("### Reasoning", "### Output")


@pytest.mark.parametrize(
    ("pieces", "markers", "opened", "expected"),
    [
        (["<think>", "a", "b", "</think>", "c"], MARKERS, False, Thought(1, 3, 4)),
        (["x", "<think>", "a", "</think>", "c"], MARKERS, False, Thought(2, 3, 4)),
        (["<think>", "a", "b"], MARKERS, False, Thought(1, 3, 3)),
        (["a", "b", "</think>", "c"], MARKERS, False, Thought(0, 2, 3)),
        (["a", "b"], MARKERS, False, None),
        (["a", "b"], MARKERS, True, Thought(0, 2, 2)),
        (["a", "</think>", "c"], MARKERS, True, Thought(0, 1, 2)),
        (["\n", "<think>", "a", "</think>", "c"], MARKERS, True, Thought(2, 3, 4)),
        (["a", "<think>", "b", "</think>", "c"], MARKERS, True, Thought(0, 3, 4)),
        (["<think>", "a", "</think>", "c", "<think>", "d", "</think>"], MARKERS, False, Thought(1, 2, 3)),
        (["<think>", "<think>", "a", "</think>", "c"], MARKERS, False, Thought(1, 3, 4)),
        (["<think>", "</think>", "c"], MARKERS, False, Thought(1, 1, 2)),
        (["###", " Reason", "ing", " a", " b", " ###", " Output", " c"], HEADINGS, False, Thought(3, 5, 7)),
        (["<thi", "nk>a", "b", "c</", "think", ">d", "e"], MARKERS, False, Thought(2, 3, 6)),
        ([], MARKERS, False, None),
        ([], MARKERS, True, Thought(0, 0, 0)),
    ],
)
def test_thoughts_match_cases_computed_by_hand(
    pieces: list[str], markers: tuple[str, str], opened: bool, expected: Thought | None
) -> None:
    assert find_thought(pieces, markers, opened) == expected


words = st.text("abc <>/thinkR#", max_size=12)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "a", "b ", ""]), max_size=12), st.booleans()
)
def test_thought_and_answer_never_overlap_and_hold_no_marker_token(pieces: list[str], opened: bool) -> None:
    found = find_thought(pieces, MARKERS, opened)
    if found is None:
        text = "".join(pieces)
        assert not opened and "<think>" not in text and "</think>" not in text
        return
    assert 0 <= found.start <= found.stop <= found.answer <= len(pieces)
    assert "</think>" not in "".join(pieces[found.start : found.stop])


@given(words, words, words, st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_for_any_tokenization_the_thought_is_inside_the_markers(
    before: str, thought: str, after: str, sizes: list[int]
) -> None:
    text = f"{before}<think>{thought}</think>{after}"
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    found, letters = find_thought(pieces), find_thought(text)
    assert found is not None and letters is not None
    inside = "".join(pieces[found.start : found.stop])
    assert inside in text[letters.start : letters.stop]
    assert text[letters.answer :].endswith("".join(pieces[found.answer :]))
    lost = letters.stop - letters.start - len(inside)
    assert lost <= 2 * max(sizes), "only tokens that hold a piece of a marker are left out"


@functools.cache
def bytewise() -> Renderer:
    return Renderer(byte_tokenizer("chatml"))


@settings(deadline=None)
@given(st.text(max_size=40))
def test_the_pieces_of_ids_concatenate_to_the_text(text: str) -> None:
    renderer = bytewise()
    ids = renderer.encode(text)
    pieces = renderer.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == renderer.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a", ""),
        ("b", "b"),
        ("x<think>a</think>b</think>c", "b</think>c"),
    ],
)
def test_the_answer_is_the_text_after_its_thought(text: str, said: str) -> None:
    assert split_thought(text)[1] == said
