"""Instruction following: every kind says yes and no; rows of every shape are read."""

import asyncio
import json

import pytest

from upshot.verifiers.constraint_checks import CHECKS, keeps
from upshot.verifiers.constraints import Constraints, constraints_of
from upshot.verifiers.languages import is_language

CASES: list[tuple[str, dict[str, object], str, str]] = [
    ("keywords:existence", {"keywords": ["tree", "river"]}, "A Tree by the river.", "A street by the river."),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "at least"}, "go, go", "go, goes"),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "less than"}, "go", "go go"),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "a badge", "Bad!"),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "at least"}, "EEe", "ee"),
    ("language:response_language", {"language": "de"}, "Das ist nicht der Weg.", "This is not the way."),
    ("language:response_language", {"language": "hi"}, "यह एक वाक्य है", "this is a sentence"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "One.", "One. Two."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\n\"Then\" second.",
        "Then.\n\nFirst.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. one more", "Bye. No postscript"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S more", "Bye.\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* b"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1 a Section 2 b",
        "Section 1",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<poem of joy>>\nla", "poem of joy"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Say hi. Hi!", "Hi!"),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, "Done. any questions?", "Any questions? Done."),
    ("startend:quotation", {}, '"all of it"', 'not "all" of it'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "YES AND no",
        "YES and",
    ),
    ("change_case:english_capital", {}, "THIS IS THE WAY IT IS", "THIS is THE WAY"),
    ("change_case:english_lowercase", {}, "this is the way it is", "This is the way"),
    ("punctuation:no_comma", {}, "no comma here", "one, two"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "kept", "broken"), CASES)
def test_every_kind_says_yes_and_no(name: str, arguments: dict[str, object], kept: str, broken: str) -> None:
    assert keeps(kept, name, arguments)
    assert not keeps(broken, name, arguments)


def test_all_kinds_are_tested_and_there_are_at_least_twenty() -> None:
    assert {name for name, *_ in CASES} == set(CHECKS)
    assert len(CHECKS) >= 20


@pytest.mark.parametrize(
    "reference",
    [
        {"instruction_id": ["punctuation:no_comma"], "kwargs": [None]},
        [{"instruction_id": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}],
        json.dumps([{"instruction_id": ["punctuation:no_comma"], "kwargs": [{}]}]),
        "[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [None]}]",
        json.dumps({"func_name": "validate_no_commas", "N": None, "quantifier": None}),
    ],
)
def test_references_of_every_shape_are_read(reference: object) -> None:
    assert constraints_of(reference, {}) == [("punctuation:no_comma", {})]


def test_ifeval_columns_are_read() -> None:
    row = {
        "instruction_id_list": ["length_constraints:number_words"],
        "kwargs": [{"num_words": 2, "relation": "at least"}],
    }
    assert Constraints().score("one two", None, row).value == 1
    assert Constraints().score("one", None, row).value == 0


def test_older_function_names_map_with_their_arguments() -> None:
    row = {"func_name": "validate_word_constraint", "N": 3, "quantifier": "at least"}
    assert constraints_of(row, {}) == [("length_constraints:number_words", {"num_words": 3, "relation": "at least"})]


def test_all_or_nothing_or_the_share() -> None:
    both = {"instruction_id": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    assert Constraints().score("no comma", both, {}).value == 0
    assert Constraints().score("no comma", both, {}).detail["broken"] == ["startend:quotation"]
    assert Constraints(partial=True).score("no comma", both, {}).value == 0.5


def test_loose_reading_forgives_an_opening_line() -> None:
    quoted = {"instruction_id": ["startend:quotation"], "kwargs": [{}]}
    response = 'Sure, here it is:\n"all of it"'
    assert Constraints().score(response, quoted, {}).value == 0
    assert Constraints("loose").score(response, quoted, {}).value == 1


def test_unknown_kinds_and_empty_rows_are_missing_with_a_hint() -> None:
    unknown = Constraints().score("x", {"instruction_id": ["punctuation:no_commas"], "kwargs": [{}]}, {})
    assert unknown.is_missing
    assert "did you mean 'punctuation:no_comma'" in unknown.detail["hint"]
    assert Constraints().score("x", None, {}).why == "constraints: none in the row"


def test_an_empty_response_keeps_nothing() -> None:
    assert Constraints().score("  ", {"instruction_id": ["punctuation:no_comma"], "kwargs": [{}]}, {}).value == 0


def test_long_responses_are_bounded() -> None:
    wanted = {"instruction_id": list(CHECKS), "kwargs": [dict(next(c[1] for c in CASES if c[0] == n)) for n in CHECKS]}
    for text in ("*" * 100_000, "a " * 50_000, "[" * 100_000, "<<" * 50_000, "\n" * 100_000):
        assert asyncio.run(Constraints("loose").verify(text, wanted, {})).value == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The cat is on the mat and it is happy.", "en"), ("El gato está en la casa y no quiere salir.", "es"),
        ("Le chat est dans la maison avec vous.", "fr"), ("Кот не хочет идти домой, и это так.", "ru"),
        ("これは日本語の文章です。", "ja"), ("هذا هو الكتاب الذي قرأته في البيت", "ar"), ("ez egy mondat", "xx"),
    ],
)  # fmt: skip
def test_languages_are_told_apart(text: str, code: str) -> None:
    assert is_language(text, code)
    assert not is_language(text, "ko")
