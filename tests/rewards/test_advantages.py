"""Group statistics: hand-computed cases, missing values, spans, and properties that hold for any rewards."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.coverage import check
from upshot.config.registry import path_of
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.rewards.advantages.grouped import (
    EPSILON,
    Advantages,
    Step,
    centred,
    estimator,
    estimators,
    grpo,
    leave_one_out,
    normalised,
)
from upshot.rewards.credit import MAIN, Credit, Span, credit_sampled, relabel, sampled_spans

rewards = st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=12)
masks = st.lists(st.integers(0, 1), max_size=40)


def test_a_group_with_a_missing_reward_matches_a_hand_computed_case() -> None:
    group = [1.0, None, 0.0, 0.5]
    assert centred(group) == [0.5, None, -0.5, 0.0]
    assert leave_one_out(group) == pytest.approx([0.75, None, -0.75, 0.0])
    assert normalised(group) == pytest.approx([0.5 / (0.5 + EPSILON), None, -0.5 / (0.5 + EPSILON), 0.0])


def credits(group: Sequence[float | None]) -> list[Credit]:
    """Replies of one token each."""
    scores = [Score.missing("timeout") if value is None else Score(value) for value in group]
    return [credit_sampled(score, [0, 1]) for score in scores]


@pytest.mark.parametrize("name", estimators.names())
@pytest.mark.parametrize("group", [[2.0], [None, 3.0], [None, None]])
def test_fewer_than_two_rewards_give_no_advantage(name: str, group: list[float | None]) -> None:
    assert estimator(name)([credits(group)]) == [[[None if value is None else 0.0] for value in group]]


def test_an_unknown_estimator_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'rloo'"):
        estimator("rlo")


@given(rewards)
def test_a_missing_reward_stays_missing_and_is_excluded_from_the_statistics(group: list[float | None]) -> None:
    present = [value for value in group if value is not None]
    for estimate in (centred, normalised, leave_one_out):
        found = estimate(group)
        assert [value is None for value in found] == [value is None for value in group]
        alone = iter(estimate(present))
        assert [value for value in found if value is not None] == pytest.approx(list(alone))


@given(rewards, st.floats(-5, 5))
def test_advantages_add_up_to_zero_and_ignore_a_shift(group: list[float | None], shift: float) -> None:
    moved = [None if value is None else value + shift for value in group]
    for estimate in (centred, normalised, leave_one_out):
        found = estimate(group)
        assert math.fsum(value or 0.0 for value in found) == pytest.approx(0, abs=1e-6)
        for one, other in zip(found, estimate(moved), strict=True):
            assert one is other is None or one == pytest.approx(other, abs=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_leave_one_out_is_scaled_centring(group: list[float]) -> None:
    scale = len(group) / (len(group) - 1)
    assert leave_one_out(group) == pytest.approx([scale * (value or 0.0) for value in centred(group)], abs=1e-9)


def test_grpo_is_what_trl_computes() -> None:
    import torch

    values = torch.tensor([0.2, 1.7, -0.3, 0.9])
    expected = (values - values.mean()) / (values.std() + 1e-4)  # GRPOTrainer: scale_rewards="group"
    assert normalised(values.tolist()) == pytest.approx(expected.tolist(), abs=1e-6)


def test_classmate_spans_match_a_hand_computed_case() -> None:
    """The example of the published method, without division by the deviation."""
    main, classmate = (8.0, 4.0, 6.0, 2.0), (2.0, 6.0, 6.0, 2.0)
    both = (MAIN, "classmate")
    spans = (Span(0, 2), Span(2, 5, both), Span(5, 7))
    group = [Credit({MAIN: Score(m), "classmate": Score(c)}, spans) for m, c in zip(main, classmate, strict=True)]
    (found,) = estimator("dr-grpo")([group])
    assert [own[1] for own in found] == [1, 1, 3, -5], "thought tokens compete by main + classmate"
    assert [own[0] for own in found] == [own[2] for own in found] == [3, -1, 1, -3], "all others by main alone"


def test_a_missing_part_masks_only_the_spans_that_need_it() -> None:
    both = (MAIN, "classmate")
    spans = (Span(0, 2, both), Span(2, 4))
    parts = [(8.0, 2.0), (4.0, None), (6.0, 6.0)]
    group = [
        Credit({MAIN: Score(m), "classmate": Score.missing("timeout") if c is None else Score(c)}, spans)
        for m, c in parts
    ]
    (found,) = estimator("dr-grpo")([[*group, None]])
    assert [own[0] for own in found[:3]] == [-1.0, None, 1.0], "10 and 12 remain"
    assert [own[1] for own in found[:3]] == [2.0, -2.0, 0.0]
    assert found[3] == []


def parted(**parts: float | None) -> Credit:
    """A reply of one token that earns all its parts."""
    scores = {name: Score.missing("timeout") if value is None else Score(value) for name, value in parts.items()}
    return Credit(scores, (Span(0, 1, tuple(scores)),))


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in estimators.names()]
    + [("grpo", {"scale": "step"}), ("grpo", {"scale": "none"}), ("reinforce++", {"baseline": "group"})]
    + [("gdpo", {"step_norm": norm}) for norm in ("sums", "none")],
)
def test_a_part_that_only_one_reply_has_changes_nothing(name: str, options: dict[str, str]) -> None:
    mains = [8.0, 4.0, 6.0, 2.0]
    group = [parted(main=8.0, classmate=5.0), *(parted(main=value) for value in mains[1:])]
    found = estimator(name, options)([group])
    plain = estimator(name, options)([[parted(main=value) for value in mains]])
    assert [own for (own,) in found[0]] == pytest.approx([own for (own,) in plain[0]]) and plain[0][0] != [0.0]


def test_if_only_one_reply_has_a_part_those_missing_it_stay_untrained() -> None:
    group = [parted(main=8.0, classmate=5.0), parted(main=4.0, classmate=None), parted(main=6.0, classmate=None)]
    for name in ("dr-grpo", "separated"):
        assert estimator(name)([group]) == [[[2.0], [None], [None]]], "the main part is centred over all three"


def test_of_parts_that_no_two_replies_share_the_rarest_is_ignored() -> None:
    group = [parted(main=1.0, first=1.0, second=2.0), parted(main=0.0, first=0.0), parted(main=0.0, first=1.0)]
    (found,) = estimator("dr-grpo")([[*group, parted(main=0.0)]])
    assert found[0] == pytest.approx([2.0 - 1.0]), "2, 0 and 1 by main and first"


def test_with_the_step_as_baseline_a_lone_reply_is_compared_with_the_step() -> None:
    step = [[parted(main=1.0, classmate=3.0)], [parted(main=0.0, classmate=1.0)]]
    found = [own for group in estimator("reinforce++")(step) for (own,) in group]
    larger = 1.5 / (math.sqrt(4.5) + EPSILON)
    assert found == pytest.approx([larger, -larger]), "4 and 1"


def test_separated_parts_are_centred_separately_and_added() -> None:
    both = (MAIN, "classmate")
    parts = [(8.0, 2.0), (4.0, 6.0), (6.0, 6.0), (2.0, 2.0)]
    group = [Credit({MAIN: Score(m), "classmate": Score(c)}, (Span(0, 1, both), Span(1, 2))) for m, c in parts]
    (found,) = estimator("separated")([group])
    assert found == [[1, 3], [1, -1], [3, 1], [-5, -3]], "without a deviation, sums of parts and parts of sums agree"
    (found,) = estimator("separated", {"non_negative": True})([group])
    assert found == [[3, 3], [1, -1], [3, 1], [-3, -3]], "a classmate's failure takes nothing away"


def test_a_missing_part_does_not_change_the_statistics_of_other_parts() -> None:
    both = (MAIN, "classmate")
    parts = [(8.0, 2.0), (4.0, None), (6.0, 6.0), (2.0, 4.0)]
    group = [
        Credit({MAIN: Score(m), "classmate": Score.missing("x") if c is None else Score(c)}, (Span(0, 1, both),))
        for m, c in parts
    ]
    (found,) = estimator("separated")([group])
    assert found == [[3.0 - 2.0], [None], [1.0 + 2.0], [-3.0 + 0.0]], "the main part is centred over all four"


def test_gdpo_normalises_each_part_and_then_over_the_step() -> None:
    import torch

    both = (MAIN, "classmate")
    numbers = torch.tensor([[[8.0, 2.0], [4.0, 6.0], [6.0, 6.0]], [[1.0, 0.0], [0.0, 30.0], [0.5, 10.0]]])
    step = [
        [Credit({MAIN: Score(m), "classmate": Score(c)}, (Span(0, 1, both),)) for m, c in group]
        for group in numbers.tolist()
    ]
    each = (numbers - numbers.mean(1, keepdim=True)) / (numbers.std(1, keepdim=True) + EPSILON)
    added = each.sum(2)
    expected = (added - added.mean()) / (added.std() + EPSILON)
    found = [[reply[0] for reply in group] for group in estimator("gdpo")(step)]
    assert torch.allclose(torch.tensor(found), expected, atol=1e-5)


@pytest.mark.parametrize("norm", ["sums", "none"])
def test_gdpo_as_published_gives_answer_tokens_their_groups_value(norm: str) -> None:
    import torch

    numbers = torch.tensor([[[8.0, 2.0], [4.0, 6.0], [6.0, 6.0]], [[1.0, 0.0], [0.0, 30.0], [0.5, 10.0]]])
    spans = (Span(0, 1, (MAIN, "classmate")), Span(1, 2))
    step = [[Credit({MAIN: Score(m), "classmate": Score(c)}, spans) for m, c in group] for group in numbers.tolist()]
    each = (numbers - numbers.mean(1, keepdim=True)) / (numbers.std(1, keepdim=True) + EPSILON)
    added = each.sum(2)
    kept = (added - added.mean()) / (added.std() + EPSILON) if norm == "sums" else added
    found = torch.tensor(estimator("gdpo", {"step_norm": norm})(step))
    assert torch.allclose(found, torch.stack([kept, each[..., 0]], 2), atol=1e-5)


def test_a_span_without_parts_has_no_advantage() -> None:
    spans = (Span(0, 2, ()), Span(2, 3))
    group = [Credit({MAIN: Score(value)}, spans) for value in (1.0, 0.0)]
    for name in estimators.names():
        (found,) = estimator(name)([group])
        assert [own[0] for own in found] == [None, None]
        assert all(own[1] is not None for own in found)


def doubled(step: Step, strength: float = 2.0) -> Advantages:
    """An estimator as a user might write one."""
    return [[[strength for _ in credit.spans] if credit else [] for credit in group] for group in step]


def test_a_users_estimator_is_named_by_path_and_its_options_are_checked() -> None:
    path = f"{__name__}:doubled"
    assert estimator(path, {"strength": 3})([credits([1.0])]) == [[[3.0]]]
    with pytest.raises(UserError, match="unknown option 'strenght'"):
        estimator(path, {"strenght": 3})


def test_an_estimator_that_wraps_a_built_in_one_is_checked_like_a_users_own() -> None:
    @functools.wraps(grpo)
    def wrapped(step: Step) -> Advantages:
        return []

    with pytest.raises(UserError, match=r"should return one number \(or None\) per span.*1 groups got 0"):
        estimator(path_of(wrapped))([credits([1.0])])


@pytest.mark.parametrize(
    ("value", "shown"), [("a", r"'a' \(str\)"), (math.nan, r"nan \(float\)"), (1e300, "1e.300"), ([1.0], "a list")]
)
def test_an_advantage_that_is_not_a_number_is_refused_with_its_place(value: Any, shown: str) -> None:
    def wrong(step: Step) -> Any:
        return [[[1.0], [value]]]

    with pytest.raises(UserError, match=rf"span 1 of group 0 got {shown}"):
        estimator(path_of(wrong))([credits([1.0, 2.0])])


def test_an_estimator_that_raises_is_named_with_its_line() -> None:
    def divides(step: Step) -> Advantages:
        raise ZeroDivisionError("no group")

    with pytest.raises(UserError, match=r"here:divides' raised ZeroDivisionError: no group \(test_.*\.py, line"):
        estimator(path_of(divides))([credits([1.0])])
    with pytest.raises(UserError, match=r"is called with \(step\), but takes \(\*, margin=0\.0\)"):
        estimator(path_of(lambda *, margin=0.0: [[[margin]]]))


@given(masks, st.integers(0, 45), st.integers(0, 45), st.booleans())
def test_relabelled_spans_still_cover_every_sampled_token_once(mask: list[int], a: int, b: int, off: bool) -> None:
    start, stop = min(a, b), max(a, b)
    found = relabel(sampled_spans(mask), start, stop, None if off else ("classmate",))
    check(Credit({}, found), mask)
    inside = () if off else (MAIN, "classmate")
    for span in found:
        for position in range(span.start, span.stop):
            assert span.parts == (inside if start <= position < stop else (MAIN,))


@given(masks, st.floats(-5, 5))
def test_spans_cover_every_sampled_token_once(mask: list[int], value: float) -> None:
    credit = credit_sampled(Score(value), mask)
    check(credit, mask)
    assert all(0 <= span.start < span.stop <= len(mask) for span in credit.spans)
    assert sampled_spans(mask) == credit.spans


@given(masks.filter(any))
def test_a_wrong_number_of_spans_is_refused(mask: list[int]) -> None:
    spans = sampled_spans(mask)
    for wrong in (spans[1:], (*spans, spans[0])):
        with pytest.raises(ValueError, match="every sampled token once"):
            check(Credit({MAIN: Score(0.0)}, wrong), mask)


def test_reinforce_plus_plus_uses_the_step_as_baseline() -> None:
    step = [credits([1.0, 1.0]), credits([0.0, None])]
    (first, second) = estimator("reinforce++")(step)
    deviation = math.sqrt(1 / 3)
    assert [a for (a,) in first] == pytest.approx([(1 / 3) / (deviation + EPSILON)] * 2), "a flat group still learns"
    assert second[0] == pytest.approx([(-2 / 3) / (deviation + EPSILON)]) and second[1] == [None]
    (first, second) = estimator("reinforce++", {"baseline": "group"})([credits([1.0, 1.0]), credits([0.0, 1.0])])
    assert [a for (a,) in first] == pytest.approx([0.0, 0.0])
    assert second[1][0] == pytest.approx(0.5 / (math.sqrt(0.5 / 3) + EPSILON))


def test_grpo_may_divide_by_the_deviation_of_the_step_or_by_nothing() -> None:
    step = [credits([1.0, 0.0]), credits([2.0, 2.0, None])]
    (first, second) = estimator("grpo", {"scale": "step"})(step)
    spread = math.sqrt(sum((r - 1.25) ** 2 for r in (1, 0, 2, 2)) / 3)
    assert first[0] == pytest.approx([0.5 / (spread + EPSILON)]) and second == [[0.0], [0.0], [None]]
    assert estimator("grpo", {"scale": "none"})(step) == estimator("dr-grpo")(step)
