"""Tool calls of the large model families: the same words and calls, however the text is split into pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from upshot.core.errors import UserError
from upshot.core.thought import GrowingThought
from upshot.models.tool_calls.base import CallParser, Part, ToolCall, parser_for, parsers
from upshot.models.tool_calls.hermes import Hermes
from upshot.models.tool_calls.llama3 import Llama3
from upshot.models.tool_calls.mistral import Mistral

FAMILIES = [Hermes, Llama3, Mistral]


def merged(parts: list[Part]) -> list[Part]:
    """Adjacent words joined into one."""
    out: list[Part] = []
    for part in parts:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        elif part:
            out.append(part)
    return out


def read(kind: type[CallParser], *pieces: str) -> list[Part]:
    parser = kind()
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged(parts + parser.finish())


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


ADD = '{"name": "add", "arguments": {"a": 1, "b": {"c": [2]}}}'
NEST = '{"name": "say", "arguments": {"text": "}{ ]\\" </tool_call> ; [TOOL_CALLS] é🙂"}}'
SAID = {"text": '}{ ]" </tool_call> ; [TOOL_CALLS] é🙂'}
ADDED = call("add", a=1, b={"c": [2]})


@pytest.mark.parametrize(
    ("kind", "text", "parts"),
    [
        (Hermes, "Hello.\n", ["Hello.\n"]),
        (Hermes, f"<tool_call>\n{ADD}\n</tool_call>", [ADDED]),
        (Hermes, f"Let me see.\n\n<tool_call>{ADD}</tool_call> Done. ", ["Let me see.", ADDED, "Done. "]),
        (
            Hermes,
            f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{NEST}\n</tool_call>\n",
            [ADDED, call("say", **SAID)],
        ),
        (Hermes, f"<tool_call>{ADD}", [ADDED]),
        (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> x', None),
        (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1', None),
        (Hermes, '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', None),
        (Hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        (Hermes, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None),
        (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', None),
        (Hermes, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', None),
        (Hermes, "a < b <tool_cal and </tool_call> <tool_call> no", None),
        (
            Hermes,
            f"<tool_call>{{bad}}</tool_call><tool_call>{ADD}</tool_call>",
            ["<tool_call>{bad}</tool_call>", ADDED],
        ),
        (Hermes, f"<tool_call>{{<tool_call>{ADD}</tool_call>", ["<tool_call>{", ADDED]),
        (Hermes, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [call("f", a=1)]),
        (Hermes, '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', [call("f", a="x\ny")]),
        (Llama3, '{"name": "f", "parameters": {"a": 1}}', [call("f", a=1)]),
        (Llama3, f'{{"name": "f", "parameters": {{}}}}; {ADD}', [call("f"), ADDED]),
        (Llama3, f"I call.\n<|python_tag|>{ADD} So.", ["I call.", ADDED, "So."]),
        (Llama3, f"{ADD}; and so on", [ADDED, "; and so on"]),
        (Llama3, '{"answer": 4}', None),
        (Llama3, f"The JSON is {ADD}", None),
        (Llama3, "<|python_tag|>print(1)", None),
        (Llama3, '{"name": "f", "parameters": {', None),
        (Mistral, f"[TOOL_CALLS] [{ADD}, {NEST}]", [ADDED, call("say", **SAID)]),
        (Mistral, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', [call("f", a=1), call("g")]),
        (Mistral, '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}', [ToolCall("f", '{"a": 1}', "abcDEF123")]),
        (Mistral, f"Well.[TOOL_CALLS]{ADD}\n", ["Well.", ADDED]),
        (Mistral, f"[TOOL_CALLS][{ADD}, 5]", None),
        (Mistral, "[TOOL_CALLS] what is {this}?", None),
        (Mistral, "[TOOL_CALLS]" + "x" * 400 + " {}", None),
        (Mistral, "[TOOL_CALLS]f[ARGS]", None),
    ],
)
def test_words_and_calls_are_separated_and_malformed_calls_are_text(
    kind: type[CallParser], text: str, parts: list[Part] | None
) -> None:
    whole = read(kind, text)
    assert whole == ([text] if parts is None else parts)
    assert read(kind, *text) == whole
    for cut in range(len(text)):
        assert read(kind, text[:cut], text[cut:]) == whole


WORDS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", ADD, NEST),
        *("{", "}", "[", "]", '"', "\\", ";", "<", "f", " ", "\n", "é🙂", '"name": "f"', '"arguments": {}', ", ", ": "),
        *("<think>", "</think>", "[TOOL_", "<tool"),
    ]
)
TEXTS = st.lists(WORDS, max_size=14).map("".join)


@pytest.mark.parametrize("kind", FAMILIES)
@settings(max_examples=120, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 200), max_size=6))
def test_the_pieces_of_a_stream_make_no_difference(kind: type[CallParser], text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    whole = read(kind, text)
    assert read(kind, *(text[a:b] for a, b in pairwise(places))) == whole == read(kind, *text)
    if not any(isinstance(part, ToolCall) for part in whole):
        assert "".join(map(str, whole)) == text  # no character is lost if nothing was called
    for part in whole:
        if isinstance(part, ToolCall):
            assert isinstance(json.loads(part.arguments), dict) and part.name


LEAF = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUE = LEAF | st.lists(LEAF, max_size=2) | st.dictionaries(st.text(max_size=3), LEAF, max_size=2)
ARGUMENTS = st.dictionaries(st.text(max_size=3), VALUE, max_size=3)


@pytest.mark.parametrize("kind", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.booleans())
def test_any_arguments_are_parsed_unchanged(
    kind: type[CallParser], made: list[dict[str, Any]], ascii_only: bool
) -> None:
    bodies = [json.dumps({"name": "f", kind.key: a}, ensure_ascii=ascii_only) for a in made]
    text = {
        Hermes: "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies),
        Llama3: "; ".join(bodies),
        Mistral: "[TOOL_CALLS][" + ", ".join(bodies) + "]",
    }[kind]
    parts = read(kind, *text)
    assert [json.loads(p.arguments) for p in parts if isinstance(p, ToolCall)] == made and len(parts) == len(made)


def think(opened: bool, *pieces: str) -> tuple[str, str]:
    growing = GrowingThought(opened)
    said = [*(growing.feed(piece) for piece in pieces), growing.finish()]
    return "".join(thought for thought, _ in said), "".join(answer for _, answer in said)


@pytest.mark.parametrize(
    ("opened", "text", "parts"),
    [
        (False, "<think>\nhm\n</think>\n\nfour\n", ("hm", "four\n")),
        (True, "\nhm\n</think>\n\nfour", ("hm", "four")),
        (True, "<think>\nhm\n</think>\n\nfour", ("hm", "four")),
        (True, "a <think> b</think>c", ("a <think> b", "c")),
        (False, " four </think> \n", ("", " four </think> \n")),
        (False, "Well. <think>hm</think> four", ("hm", "Well.four")),
        (False, "<think>never ends\n", ("never ends", "")),
        (True, "never ends </thin", ("never ends </thin", "")),
        (False, "<think></think>a <think>b</think>", ("", "a <think>b</think>")),
        (False, "a < b <thin", ("", "a < b <thin")),
    ],
)
def test_a_streamed_thought_is_separated_from_the_answer(opened: bool, text: str, parts: tuple[str, str]) -> None:
    assert think(opened, text) == think(opened, *text) == parts


@settings(max_examples=120, deadline=None)
@given(st.booleans(), TEXTS, st.lists(st.integers(0, 200), max_size=6))
@example(True, "<think>", [3])
def test_the_pieces_of_a_thought_make_no_difference(opened: bool, text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert think(opened, *(text[a:b] for a, b in pairwise(places))) == think(opened, text) == think(opened, *text)


def test_a_text_full_of_call_openings_is_parsed_in_linear_time() -> None:
    text = '<tool_call>{"' * 5_000
    assert read(Hermes, *(text[i : i + 4] for i in range(0, len(text), 4))) == [text]


def test_the_family_is_recognised_by_the_chat_template() -> None:
    assert parser_for('<tool_call>\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\n</tool_call>') is Hermes
    assert parser_for("<|start_header_id|>ipython<|end_header_id|>") is Llama3
    assert parser_for("[TOOL_CALLS]") is Mistral
    assert parser_for("<|im_start|>") is None and parser_for("<tool_call><function=f>") is None
    assert parser_for("<|im_start|>", "qwen") is Hermes and parser_for("[TOOL_CALLS]", "none") is None
    with pytest.raises(UserError, match="did you mean 'hermes'"):
        parser_for("", "herms")
    assert parsers.names() == ["hermes", "llama3", "mistral", "mistral-args", "qwen"]
    assert len(Mistral.new_id()) == 9 and Mistral.new_id().isalnum()
