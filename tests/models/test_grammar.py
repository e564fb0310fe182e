"""JSON grammars: white space between the parts of a text is bounded."""

import json
from typing import Any

import pytest

llguidance = pytest.importorskip("llguidance")

from upshot.core.errors import UserError  # noqa: E402
from upshot.models.grammar import SchemaCompiler  # noqa: E402
from upshot.models.tiny import tiny_tokenizer  # noqa: E402

OBJECT = {"type": "object"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "number"}}},
    "required": ["a"],
    "additionalProperties": False,
}
VALUE = {"a": "x  y", "b": [1, 2]}


@pytest.fixture
def compiler() -> SchemaCompiler:
    made = SchemaCompiler.__new__(SchemaCompiler)
    made._tokenizer = llguidance.LLTokenizer("byte")
    made.vocab = made._tokenizer.vocab_size
    return made


def taken(compiler: SchemaCompiler, schema: dict[str, Any], text: str) -> int:
    """How many bytes of a text the grammar accepts."""
    matcher = compiler.grammar(schema)().matcher  # type: ignore[attr-defined]
    return int(matcher.try_consume_tokens(compiler._tokenizer.tokenize_str(text)))


@pytest.mark.parametrize("schema", [OBJECT, SCHEMA])
@pytest.mark.parametrize("blank", [" ", "\n", "\t", " \n"])
@pytest.mark.parametrize("before", ['{"a"', '{"a":', '{"a":"x"', "{"])
def test_a_model_cannot_fill_its_budget_with_blanks(
    compiler: SchemaCompiler, schema: dict[str, Any], blank: str, before: str
) -> None:
    assert taken(compiler, schema, before + blank * 50) <= len(before) + 9


@pytest.mark.parametrize("schema", [OBJECT, SCHEMA])
@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"separators": (",", ":")}])
def test_the_usual_layouts_are_accepted(
    compiler: SchemaCompiler, schema: dict[str, Any], layout: dict[str, Any]
) -> None:
    text = json.dumps(VALUE, **layout)
    assert taken(compiler, schema, text) == len(text)


def test_a_schema_may_define_its_own_layout(compiler: SchemaCompiler) -> None:
    roomy = {**OBJECT, "x-guidance": {"whitespace_pattern": r"[ \n]{0,40}"}}
    text = "{" + " " * 30 + '"a":1}'
    assert taken(compiler, roomy, text) == len(text)


def test_a_tokenizer_of_words_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"whose tokenizer has no bytes .* use a model with a byte-level tokenizer"):
        SchemaCompiler(tiny_tokenizer(["a", "b"]), 9, {1})
