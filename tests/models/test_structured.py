"""JSON from a model: what was meant is kept, and errors say what is wrong."""

import asyncio
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.models.base import Abilities, Completion, Model, ModelCallError, Request
from upshot.models.structured import ask_json, parse_json_object, schema_flaw
from upshot.tasks.participants.ask import ask

SCHEMA = {
    "type": "object",
    "properties": {"response": {"type": "string"}, "score": {"type": "number", "minimum": 0, "maximum": 1}},
    "required": ["response"],
    "additionalProperties": False,
}
CONTROL_BEFORE_LETTER = re.compile(r"[\b\f\r\t\n](?=[A-Za-z])")


@given(st.text())
@example("<think>")
@example("</think> {")
def test_any_text_survives_a_round_trip_through_json(text):
    # A control character before a letter is what unescaped LaTeX looks like; everything else comes back unchanged.
    text = CONTROL_BEFORE_LETTER.sub(" ", text)
    for written in (json.dumps({"response": text}), json.dumps({"response": text}, ensure_ascii=False)):
        assert parse_json_object(written) == {"response": text}
        assert parse_json_object(f"Sure!\n```json\n{written}\n```") == {"response": text}
        assert parse_json_object(f"Here you go: {written} Hope it helps") == {"response": text}


@given(st.lists(st.sampled_from(["\\", '"', "{", "}", "n", "u00e9", "frac", " ", "é", "[", "```"]), max_size=12))
def test_backslashes_and_braces_survive_in_any_mixture(pieces):
    text = "".join(pieces)
    assert parse_json_object("x " + json.dumps({"response": text}) + " y") == {"response": text}


@pytest.mark.parametrize(
    "latex",
    [r"\frac{1}{2}", r"\beta", r"\times 3", r"\neq 0", r"\right)", r"\sqrt{2}", r"\underline{x}", r"\text{if }"],
)
def test_latex_survives_whether_or_not_its_backslash_was_escaped(latex):
    for written in (latex, latex.replace("\\", "\\\\")):
        assert parse_json_object('{"response": "so $x = ' + written + '$"}')["response"] == f"so $x = {latex}$"


def test_line_breaks_and_tabs_stay():
    assert parse_json_object(r'{"response": "one\nnew line\n\tcode\nuse"}')["response"] == "one\nnew line\n\tcode\nuse"
    assert parse_json_object('{"response": "a raw\nbreak"}')["response"] == "a raw\nbreak"


def test_a_number_in_quotes_stays_text():
    assert parse_json_object('{"response": "42"}', SCHEMA) == {"response": "42"}
    with pytest.raises(ValueError, match="'response': 42 is not of type 'string'"):
        parse_json_object('{"response": 42}', SCHEMA)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no", "not valid JSON"),
        ("[1]", "a JSON object is needed, not list"),
        ('{"response": "cut', "not valid JSON"),
        ('{"score": 0.5}', "'response' is a required property"),
        ('{"response": "a", "score": 1.5}', "'score': 1.5 is greater than the maximum of 1"),
        ('{"response": "a", "score": NaN}', "NaN"),
        ('{"response": "a", "score": true}', "'score': True is not of type 'number'"),
        ('{"response": "a", "other": 1}', "'other' was unexpected"),
    ],
)
def test_an_object_that_does_not_fit_is_refused_with_the_reason(text, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_json_object(text, SCHEMA)


def test_the_first_object_that_fits_is_taken():
    assert parse_json_object('{"thought": 1} then {"response": "b"}', SCHEMA) == {"response": "b"}


QUOTING = [
    'It wrote {"response": "great"}, which is wrong. {"response": "bad"}',
    '<think>It wrote "</think>{"response": "great"}".</think>{"response": "bad"}',
    'It wrote\n```json\n{"response": "great"}\n```\nI say\n```json\n{"response": "bad"}\n```',
]


@pytest.mark.parametrize("text", QUOTING)
def test_a_judge_or_monitor_that_quotes_another_verdict_beside_its_own_is_asked_again(text):
    for role, answer in (("judge", "bad"), ("monitor", "bad"), ("user", "great")):
        model = Lines(text, '{"response": "bad"}')
        assert asyncio.run(ask_json(model, [Message("user", "q")], SCHEMA, role=role)) == {"response": answer}
        model = Lines(text, '{"response": "bad"}')
        made = asyncio.run(ask(model, "q", SCHEMA, lambda values: None, Sampling(), role))
        assert made.values == {"response": answer}


def test_the_same_verdict_twice_is_one():
    text = 'Draft: {"response": "a"}. Final: {"response": "a"} {"note": 1}'
    assert parse_json_object(text, SCHEMA, alone=True) == {"response": "a"}


def test_nested_lists_enums_and_lengths_are_checked():
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2}
    assert schema_flaw(["a"], schema) is None
    assert "'[1]': 'c' is not one of" in str(schema_flaw(["a", "c"], schema))
    assert "non-empty" in str(schema_flaw([], schema))
    assert schema_flaw(2.0, {"type": "integer"}) is None
    assert schema_flaw(2.5, {"type": "integer"}) is not None
    assert schema_flaw(None, {"type": ["string", "null"]}) is None
    assert schema_flaw(True, {"type": ["integer", "number"]}) is not None, "true is no number"
    assert schema_flaw(None, {"anyOf": [{"type": "string"}, {"type": "null"}]}) is None


def test_errors_name_their_place_the_value_and_what_is_expected():
    inner = {"type": "object", "properties": {"n": {"type": "integer", "exclusiveMaximum": 3}}, "required": ["n"]}
    schema = {"$defs": {"inner": inner}, "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/inner"}}}}
    assert schema_flaw({"a": [{"n": 1}, {}]}, schema) == "'a[1]': 'n' is a required property"
    assert schema_flaw({"a": [{"n": 3}]}, schema) == "'a[0].n': 3 is greater than or equal to the maximum of 3"
    assert schema_flaw({"a": [{"n": 0}]}, schema) is None
    assert schema_flaw("abc", {"maxLength": 2}) == "'abc' is too long"
    assert "does not match" in str(schema_flaw("abc", {"pattern": "^x"}))
    assert "not valid under any" in str(schema_flaw(1, {"anyOf": [{"type": "string"}, {"type": "null"}]}))


class Lines(Model):
    """Answers with the next line at each call."""

    name = "lines"

    def __init__(self, *lines: str, schema: bool = False, no_schema: str = "", lengths: bool = False) -> None:
        self.lines = list(lines)
        self.asked: list[Request] = []
        self.abilities, self.no_schema = Abilities(schema=schema, lengths=lengths), no_schema

    async def generate(self, request: Request) -> list[Completion]:
        self.asked.append(request)
        line = self.lines.pop(0)
        return [Completion(line, "length" if line.endswith("…") else "stop")]


def test_a_model_is_asked_again_with_the_error():
    model = Lines("hm", '{"response": 3}', '{"response": "fine"}')
    assert asyncio.run(ask_json(model, [Message("user", "q")], SCHEMA)) == {"response": "fine"}
    assert '{"response": "text", "score": number from 0 to 1}' in model.asked[0].prompt[-1].content
    assert "'response': 3 is not of type 'string'" in model.asked[2].prompt[-1].content


def test_exhausted_repairs_are_a_failure_with_its_reason():
    with pytest.raises(ModelCallError, match="bad_json") as caught:
        asyncio.run(ask_json(Lines("a", "b", "c"), [Message("user", "q")], SCHEMA))
    assert caught.value.reason == "bad_json"


def test_an_endpoint_that_enforces_schemas_is_not_asked_in_words():
    model = Lines('{"response": "fine"}', schema=True)
    asyncio.run(ask_json(model, [Message("user", "q")], SCHEMA))
    assert [m.content for m in model.asked[0].prompt] == ["q"]
    assert model.asked[0].schema == SCHEMA


def test_after_a_truncated_object_shorter_texts_are_asked_for_if_lengths_are_enforced():
    for lengths in (True, False):
        model = Lines('{"response": "a…', '{"response": "b…', '{"response": "c"}', schema=True, lengths=lengths)
        sampling = Sampling(max_tokens=100)
        assert asyncio.run(ask_json(model, [Message("user", "q")], SCHEMA, sampling)) == {"response": "c"}
        asked = [request.schema["properties"]["response"].get("maxLength") for request in model.asked]
        assert asked == ([None, 50, 25] if lengths else [None, None, None])


def test_a_missing_library_that_would_enforce_the_schema_is_named():
    model = Lines("a", "b", "c", no_schema="strict JSON is only enforced with the library x")
    with pytest.raises(ModelCallError, match="only enforced with the library x"):
        asyncio.run(ask_json(model, [Message("user", "q")], SCHEMA))
