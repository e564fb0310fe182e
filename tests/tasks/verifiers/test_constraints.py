"""Instruction following: every kind of constraint accepts and rejects; rows of every format are read."""

import asyncio
import json
from typing import Any

import pytest
from constraint_rows import AGREED, ON_PURPOSE

from upshot.tasks.verifiers.ifeval.constraints import CHECKS, ConstraintsVerifier, constraints_of, keeps
from upshot.tasks.verifiers.ifeval.languages import LANGUAGES, is_language
from upshot.tasks.verifiers.ifeval.olmo import SAME

CASES: list[tuple[str, dict[str, object], str, str]] = [
    ("keywords:existence", {"keywords": ["tree", "river"]}, "A Street by the river.", "A trap by the river."),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "at least"}, "go, goes", "go, went"),
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
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye. P. S. more", "Bye.\nPsychology helps"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "p.s. more", "PS more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "-one\n *two", "-one\n**bold**"),
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

PHRASE = {"phrase": "the big red dog", "small_n": 2}
REQUEST = {"prompt_to_repeat": "Say hi now."}
FURTHER: list[tuple[str, dict[str, object], str, str]] = [
    ("copy:repeat_phrase", PHRASE, "the old red dog. The big blue dog!", "the big red dog, the big blue dog"),
    ("copy:copy", REQUEST, "say hi now.", "Say hi now. Hi!"),
    ("copy:copying_simple", REQUEST, " Say hi now.", "Hi"),
    ("copy:copying_multiple", {**REQUEST, "N": 2}, "Say hi now.\n******\nsay hi now.", "Say hi now."),
    ("new:copy_span_idx", {**REQUEST, "n_start": 4, "n_end": 6}, "hi", "Say hi"),
    ("detectable_format:sentence_hyphens", {}, "It is one.-It is two.", "It is one. It is two-fold."),
    ("detectable_format:square_brackets", {}, "[all] [of] [it]", "[all] of [it]"),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>", "<<I am>> at home"),
    ("keywords:no_adjacent_consecutive", {}, "a cat eats", "a big cat"),
    ("keywords:word_once", {"keyword": "run"}, "He was running.", "run and run"),
    ("keywords:word_count_different_numbers", {"keyword": "go", "frequency": 2, "relation": "at least"}, "go go", "go"),
    ("keywords:exclude_word_harder", {"keyword": "tree"}, "streets", "a tree."),
    ("keywords:palindrome", {}, "He is on the Level.", "I have a plan"),
    ("keywords:keyword_specific_position", {"keyword": "red", "n": 2, "m": 3}, "One. It is, Red.", "It is red. One."),
    ("keywords:start_end", {}, "Home is where I call home", "Home is home."),
    ("paragraphs:paragraphs", {}, "one\n***\ntwo", "one"),
    ("paragraphs:paragraphs2", {}, "one\n\ntwo", "one\n\ntwo\n\nthree"),
    ("first_word:first_word_sent", {"first_word": "so"}, "So it is. So, be it.", "So it is. It is."),
    ("first_word:first_word_answer", {"first_word": "so"}, "So, be it.", "It is so."),
    ("last_word:last_word_sent", {"last_word": ["now"]}, "Do it now. Go now!", "Do it now. Go!"),
    ("last_word:last_word_answer", {"last_word": "now"}, "Go now!", "Now go"),
    ("punctuation:punctuation_dot", {}, "no dot!", "3.5"),
    ("punctuation:punctuation_exclamation", {}, "calm.", "hey!"),
    ("count:lowercase_counting", {"N": 1}, "ONE two THREE", "one two"),
    ("letters:letter_counting", {"N": 3, "relation": "less than"}, "a 1 b", "abc"),
    ("letters:letter_counting2", {"letter": "e", "let_frequency": 2, "let_relation": "at least"}, "Eve", "even"[1:]),
    (
        "count:counting_composition",
        {"n_sent": 1, "n_words": 2},
        "It rains.\n* * *\nIt snows.\n***\nIt shines.",
        "It rains.\n***\nIt snows.",
    ),
    ("count:count_unique", {}, "no word is here again, right.", "The end of the day"),
    ("count:count_increment_word", {"keyword1": "sun", "keyword2": "moon"}, "sun, moon, moon", "sun, moon"),
]  # fmt: skip
OLD: list[tuple[str, dict[str, object], str, str]] = [
    ("verify_keyword_frequency", {"word": "go", "N": 2}, "go, Go, goes", "go go go"),
    ("validate_forbidden_words", {"forbidden_words": ["bad"]}, "good", "a badge"),
    ("verify_letter_frequency", {"letter": "e", "N": 2}, "Eee", "eee"),
    ("verify_paragraph_count", {"N": 2}, "one\n* * *\ntwo", "one\n***\ntwo"),
    ("validate_word_constraint", {"N": 30, "quantifier": "around"}, "a " * 33, "a " * 34),
    ("verify_sentence_constraint", {"N": 30, "quantifier": "around"}, "It is. " * 31, "It is. " * 32),
    ("verify_sentence_constraint", {"N": 1, "quantifier": "at most"}, "Dr. No is here, e.g. today.", "One. Two."),
    ("validate_paragraphs", {"N": 2, "i": 2, "first_word": "Then"}, "First.\n\nThen.", "First.\n\nthen."),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Bye. P.S. more", "Bye. P.S."),
    ("verify_bullet_points", {"N": 2}, "-one\n* two", "* one"),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part one Part two", "Intro Part one Part two"),
    ("validate_json_format", {}, "[1]", "```json\n[1]\n```"),
    ("validate_repeat_prompt", {"original_prompt": "Say hi."}, "Say hi. Hi!", "say hi. Hi!"),
    ("validate_two_responses", {}, "one******two", "one******two******three"),
    ("validate_uppercase", {}, "DAS IST NICHT DER WEG", "DAS ist NICHT"),
    ("validate_lowercase", {}, "das ist nicht der weg", "Das"),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at most"}, "YES AND no", "A B C"),
    ("validate_end", {"end_phrase": "Bye."}, "So, Bye.", "So, bye."),
]  # fmt: skip
CASES += FURTHER + OLD


@pytest.mark.parametrize(("name", "arguments", "kept", "broken"), CASES)
def test_every_kind_accepts_and_rejects(name: str, arguments: dict[str, object], kept: str, broken: str) -> None:
    assert keeps(kept, name, arguments)
    assert not keeps(broken, name, arguments)


@pytest.mark.parametrize(("name", "text", "arguments", "kept"), [*AGREED, *ON_PURPOSE])
def test_hand_written_rows_get_the_reference_verdict_or_a_deliberately_different_one(
    name: str, text: str, arguments: dict[str, object], kept: bool
) -> None:
    row = (
        {"func_name": name, **arguments} if ":" not in name else {"instruction_id_list": [name], "kwargs": [arguments]}
    )
    assert ConstraintsVerifier().score(text, row, {}).value == kept


def test_all_kinds_are_tested() -> None:
    assert {name for name, *_ in CASES} == set(CHECKS)
    assert len({name for name, *_ in FURTHER}) == 29
    assert len({name for name, *_ in OLD} | set(SAME)) == 25


RENAMED = [
    ("verify_keywords", {"keyword_list": ["run"]}, "Running", "walk"),
    ("validate_quotation", {}, '"all"', 'all "of it"'),
]


@pytest.mark.parametrize(("name", "arguments", "kept", "broken"), [*OLD, *RENAMED])
def test_older_rows_are_read_by_their_functions_meaning(
    name: str, arguments: dict[str, object], kept: str, broken: str
) -> None:
    row = json.dumps({"func_name": name, **arguments, "end_phrase": arguments.get("end_phrase")})
    assert ConstraintsVerifier().score(kept.strip(), row, {}).value == 1
    assert ConstraintsVerifier().score(broken.strip(), row, {}).value == 0


@pytest.mark.parametrize(
    "reference",
    [
        {"instruction_id": ["punctuation:no_comma"], "kwargs": [None]},
        [{"instruction_id": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}],
        json.dumps([{"instruction_id": ["punctuation:no_comma"], "kwargs": [{}]}]),
        "[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [None]}]",
        ['{"instruction_id": ["punctuation:no_comma"], "kwargs": ["{}"]}'],
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
    assert ConstraintsVerifier().score("one two", None, row).value == 1
    assert ConstraintsVerifier().score("one", None, row).value == 0


@pytest.mark.parametrize("reference", ["an answer in words", "", {}, []])
def test_ifeval_columns_are_read_beside_a_reference_without_constraints(reference: Any) -> None:
    row = {
        "instruction_id_list": ["length_constraints:number_words"],
        "kwargs": [{"num_words": 2, "relation": "at least"}],
    }
    assert [ConstraintsVerifier().score(text, reference, row).value for text in ("one two", "one")] == [1, 0]


def test_older_functions_that_mean_an_ifeval_kind_are_that_kind() -> None:
    row = {"func_name": "validate_placeholders", "N": 3, "quantifier": None}
    assert constraints_of(row, {}) == [("detectable_content:number_placeholders", {"num_placeholders": 3})]


def test_arguments_that_do_not_match_the_constraints_are_a_bad_row() -> None:
    row = {"instruction_id": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}]}
    score = ConstraintsVerifier().score("no comma", row, {})
    assert score.is_missing
    assert score.why == "constraints: 2 constraints but 1 kwargs"


def test_an_unknown_kind_costs_only_its_own_part() -> None:
    three = ["punctuation:no_comma", "startend:quotation", "count:made_up"]
    row = {"instruction_id": three, "kwargs": [{}, {}, {}]}
    part = ConstraintsVerifier(partial=True).score("no comma", row, {})
    assert (part.value, part.detail["unknown"]) == (0.5, ["count:made_up"])
    assert ConstraintsVerifier().score("no comma", row, {}).value == 0  # violated whatever the third one says
    assert ConstraintsVerifier().score('"no comma"', row, {}).is_missing
    assert ConstraintsVerifier(partial=True).score("x", {"instruction_id": ["a:b"], "kwargs": [{}]}, {}).is_missing


def test_wrong_arguments_cost_only_their_own_part() -> None:
    row = {"instruction_id": ["punctuation:no_comma", "keywords:word_once"], "kwargs": [{}, {"keyword": 7}]}
    assert ConstraintsVerifier(partial=True).score("no comma", row, {}).value == 1
    with pytest.raises(TypeError):  # a manager turns it into a missing score
        ConstraintsVerifier().score("no comma", row, {})


def test_the_score_is_all_or_nothing_or_the_share() -> None:
    both = {"instruction_id": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    assert ConstraintsVerifier().score("no comma", both, {}).value == 0
    assert ConstraintsVerifier().score("no comma", both, {}).detail["broken"] == ["startend:quotation"]
    assert ConstraintsVerifier(partial=True).score("no comma", both, {}).value == 0.5


def test_loose_reading_forgives_an_opening_line() -> None:
    quoted = {"instruction_id": ["startend:quotation"], "kwargs": [{}]}
    response = 'Sure, here it is:\n"all of it"'
    assert ConstraintsVerifier().score(response, quoted, {}).value == 0
    assert ConstraintsVerifier("loose").score(response, quoted, {}).value == 1


def test_unknown_kinds_and_empty_rows_are_missing_with_a_hint() -> None:
    unknown = ConstraintsVerifier().score("x", {"instruction_id": ["punctuation:no_commas"], "kwargs": [{}]}, {})
    assert unknown.is_missing
    assert "did you mean 'punctuation:no_comma'" in unknown.detail["hint"]
    assert ConstraintsVerifier().score("x", None, {}).why == "constraints: none in the row"


def test_an_empty_response_satisfies_no_constraint() -> None:
    assert (
        ConstraintsVerifier().score("  ", {"instruction_id": ["punctuation:no_comma"], "kwargs": [{}]}, {}).value == 0
    )


def test_long_responses_are_bounded() -> None:
    wanted = {"instruction_id": list(CHECKS), "kwargs": [dict(next(c[1] for c in CASES if c[0] == n)) for n in CHECKS]}
    for text in ("*" * 20_000, "a " * 10_000, "[" * 20_000, "<<" * 10_000, "\n" * 20_000):
        assert asyncio.run(ConstraintsVerifier("loose").verify(text, wanted, {})).value == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The cat is on the mat and it is happy.", "en"), ("El gato está en la casa y no quiere salir.", "es"),
        ("Le chat est dans la maison avec vous.", "fr"), ("Кот не хочет идти домой, и это так.", "ru"),
        ("これは日本語の文章です。", "ja"), ("هذا هو الكتاب الذي قرأته في البيت", "ar"),
    ],
)  # fmt: skip
def test_languages_are_distinguished(text: str, code: str) -> None:
    assert is_language(text, code)
    assert not is_language(text, "ko")


@pytest.mark.parametrize(
    "text", ["The cat is on the mat and it is happy.", "I would like to thank you all for coming tonight."]
)
def test_an_english_text_is_in_no_other_language(text: str) -> None:
    assert [code for code in LANGUAGES if is_language(text, code)] == ["en"]
    assert [code for code in LANGUAGES if is_language(text.upper(), code)] == ["en"]


def test_a_less_common_language_is_recognised_too() -> None:
    assert is_language("Kaixo, hau euskaraz idatzitako testu bat da.", "eu")
    assert not is_language("The cat is on the mat and it is happy.", "eu")


ENGLISH = [
    "OK", "Hello", "Hi there!", "go team go", "Is it in Berlin?", "Name: John Smith\nAge: 30", "data model",
    "1. Red\n2. Green\n3. Blue", "banana apple zebra", "Total: 42 km", "San Francisco", "Radio, hotel, taxi, bus.",
]  # fmt: skip


@pytest.mark.parametrize("text", ENGLISH)
def test_a_few_words_are_taken_for_one_language_at_most_and_where_they_do_not_tell_the_score_is_missing(
    text: str,
) -> None:
    taken = {code: is_language(text, code) for code in LANGUAGES}
    assert list(taken.values()).count(True) <= 1
    code = next(code for code, verdict in taken.items() if verdict is None)
    row = {"instruction_id": ["language:response_language"], "kwargs": [{"language": code}]}
    assert ConstraintsVerifier().score(text, row, {}).reason == "undecided"
    assert ConstraintsVerifier("loose").score(f"{text}\nThis is certainly not that.", row, {}).is_missing


def test_an_undecidable_constraint_costs_only_its_part_and_a_violated_one_decides() -> None:
    names = ["language:response_language", "punctuation:no_comma"]
    row = {"instruction_id": names, "kwargs": [{"language": "de"}, {}]}
    assert ConstraintsVerifier().score("OK", row, {}).reason == "undecided"
    assert ConstraintsVerifier().score("OK,", row, {}).value == 0
    assert ConstraintsVerifier(partial=True).score("OK", row, {}).value == 1


def test_very_short_texts_are_undecidable_except_in_another_script() -> None:
    assert keeps("no comma here", "change_case:english_lowercase", {})  # case counts there
    assert is_language("OK", "ko") is False
    assert is_language("42", "de") is None and is_language("ez egy mondat", "xx") is None
