"""Signs in the logs, their outcomes with intervals, and the page that shows them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.cli import main
from upshot.core.conversation import Message
from upshot.offline.logs.page import side
from upshot.offline.logs.read import LoggedConversation
from upshot.offline.logs.signs import (
    KINDS,
    OTHERS,
    TELLING,
    Mean,
    Survey,
    abandoned,
    asks,
    corrected,
    language,
    repeats,
)
from upshot.offline.statistics import wilson


def talk(*said: str, outcome: float | None = None, place: str = "here", kind: str = "") -> LoggedConversation:
    roles = ("user", "assistant")
    messages = tuple(Message(roles[at % 2], text) for at, text in enumerate(said))
    return LoggedConversation(messages, outcome=outcome, place=place, kind=kind)


def test_signs_are_recognised_by_words() -> None:
    plain = talk("my line is dead", "done", "thanks", "bye")
    assert not any(sign(plain) for sign in (asks, repeats, corrected, abandoned))
    assert asks(talk("hi", "which order?")) and abandoned(talk("hi", "which order?"))
    assert not abandoned(talk("hi", "which order?", "17"))
    assert repeats(talk("hi", "Which order?", "what", "which ORDER"))
    assert corrected(talk("a lamp", "a red one", "no, I meant a small one"))
    assert not corrected(talk("no, I meant it", "fine")), "nothing came before it"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("where is the parcel for you", "English"),
        ("ich habe das nicht und die ist weg", "German"),
        ("где моя посылка", "Cyrillic"),
        ("我的包裹在哪里", "Cjk"),
        ("17", "Other"),
    ],
)
def test_languages_are_told_by_script_and_common_words(said: str, name: str) -> None:
    assert language(talk(said, "ok")) == name


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40))
def test_the_running_mean_is_the_mean_and_lies_in_its_interval(values: list[float]) -> None:
    mean = Mean()
    for value in values:
        mean.add(value)
    found = mean.estimate()
    assert found is not None and found.n == len(values)
    assert found.mean == pytest.approx(sum(values) / len(values), abs=1e-9)
    assert found.low - 1e-9 <= found.mean <= found.high + 1e-9


def test_zeros_and_ones_have_wilsons_interval_and_no_values_have_none() -> None:
    mean = Mean()
    assert mean.estimate() is None
    for value in (1.0, 0.0, 1.0, 1.0):
        mean.add(value)
    assert mean.estimate() == wilson(3, 4)


def test_the_survey_compares_outcomes_with_and_without_a_sign() -> None:
    survey = Survey()
    for number in range(30):
        asking = number % 3 == 0
        said = ("hi", "which one?" if asking else "done", "ok", "fine")
        survey.add(talk(*said, outcome=float(asking), place=str(number)))
    survey.add(talk("hi", "no outcome here"))
    sign = survey.to_dict()["signs"]["asks"]
    assert sign["with"]["value"] == 1 and sign["without"]["value"] == 0 and sign["without"]["n"] == 20
    assert sign["share"]["n"] == 31, "conversations without an outcome have signs, too"


def test_the_shown_conversations_are_the_worst_and_best_and_at_most_twenty() -> None:
    survey = Survey()
    for number in range(100):
        survey.add(talk("hi", "ho", outcome=number / 100, place=str(number)))
    places = [int(one.place) for one in survey.telling()]
    assert sorted(places) == [*range(TELLING), *range(100 - TELLING, 100)]
    assert places[0] == 0 and places[TELLING] == 99


def test_the_page_escapes_markup_in_logs_and_needs_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "<script>alert(1)</script> & <img src=http://x>"
    lines = [
        {"messages": [{"role": "user", "content": hostile}, {"role": "assistant", "content": "ok?"}], "rating": n}
        for n in (1, 5)
    ]
    (tmp_path / "logs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = tmp_path / "page.html"
    assert main(["logs", "look", str(tmp_path / "logs.jsonl"), "--out", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["conversations"] == 2 and told["outcome"]["value"] == 3
    text = page.read_text()
    assert "<script" not in text and "<img" not in text and "&lt;script&gt;" in text
    assert "default-src 'none'" in text and "<b>outcome 1</b>" in text and "logs.jsonl, line 1," in text


def test_better_and_worse_need_enough_conversations_and_separate_intervals() -> None:
    def found(value: float, n: int) -> dict[str, float]:
        return wilson(round(value * n), n).to_dict()

    assert side({"with": found(0.1, 100), "without": found(0.9, 100)}) == "worse"
    assert side({"with": found(0.9, 100), "without": found(0.1, 100)}) == "better"
    assert side({"with": found(0.5, 100), "without": found(0.55, 100)}) == ""
    assert side({"with": {"value": 4, "low": 4, "high": 4, "n": 1}, "without": found(0.5, 100)}) == ""
    assert side({"with": {}, "without": found(0.5, 100)}) == ""


def test_no_readable_conversation_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs.jsonl").write_text("nothing\n")
    assert main(["logs", "look", str(tmp_path / "logs.jsonl"), "--out", str(tmp_path / "page.html")]) == 1
    assert "broken line (not JSON) (logs.jsonl, line 1)" in capsys.readouterr().out


def mean_of(*values: float) -> Mean:
    mean = Mean()
    for value in values:
        mean.add(value)
    return mean


@pytest.mark.parametrize("values", [(0.1, 0, 0, 0, 0.9, 0), (1, 1, 1, 0.2), (0, 0, 0, 5), (2.0, 2.0), (-1, 0, 1, 0)])
def test_an_interval_of_shares_stays_between_0_and_1_and_one_of_counts_is_not_negative(
    values: tuple[float, ...],
) -> None:
    estimate = mean_of(*values).estimate()
    assert estimate is not None and estimate.low <= estimate.mean <= estimate.high
    assert estimate.low >= min(0, *values) and estimate.high <= (1 if max(values) <= 1 else math.inf)


def test_a_group_with_ones_only_has_the_interval_of_ratings_where_others_have_more() -> None:
    survey = Survey()
    for number in range(20):
        survey.add(talk("hi", "which one?" if number < 4 else "done", outcome=1.0 if number < 4 else 5.0))
    told = survey.to_dict()
    assert told["signs"]["asks"]["with"]["low"] == 1.0, "0.51 is no rating from 1 to 5"
    assert told["sizes"]["words of a user's turn"]["low"] == 1.0, "numbers of words are no shares"


def test_kinds_beyond_the_first_are_one_kind_and_none_is_lost() -> None:
    survey = Survey()
    for number in range(KINDS + 7):
        survey.add(talk("hi", "ho", outcome=1.0, kind=str(number)))
    kinds = survey.to_dict()["kinds"]
    assert len(kinds) == KINDS + 1 and kinds[OTHERS]["n"] == 7


def test_halves_and_twos_are_not_taken_for_zeros_and_ones() -> None:
    # The sum of their squares equals their sum, as it does for zeros and ones.
    estimate = mean_of(*[0.5] * 8, 2.0).estimate()
    assert estimate is not None and estimate.mean == pytest.approx(6 / 9) and estimate.high > 0.9
