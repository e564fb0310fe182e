"""Demonstrations with tool calls: calls are trained in the template's own format, with the tools in the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.templates import byte_tokenizer
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer

TURN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if not m.tool_calls or CONTENT %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
TEMPLATES = {
    "keeps the content": "{{ tools | length if tools else 0 }}" + TURN.replace("CONTENT", "true") + "PROMPT",
    "leaves the content out": "{{ tools | length if tools else 0 }}" + TURN.replace("CONTENT", "false") + "PROMPT",
}
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THOUGHT = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
CALL = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": '{"x": "2+2"}'}}
TALK = [
    Message("user", "2+2?"),
    Message("assistant", "hm", tool_calls=(CALL,)),
    Message("tool", "4", tool_call_id="1"),
    Message("assistant", "4"),
]
TOOLS = [{"type": "function", "function": {"name": "calc"}}]


def trained(template: str, talk: list[Message]) -> tuple[str, str]:
    """The whole text of a demonstration, and the part of it that is trained."""
    tokenizer: Any = byte_tokenizer("chatml")
    tokenizer.chat_template = template
    ids, mask = Renderer(tokenizer).demonstration(talk, TOOLS)
    learned = [i for i, bit in zip(ids, mask, strict=True) if bit]
    return tokenizer.decode(ids), tokenizer.decode(learned)


@pytest.mark.parametrize("prompt", [PROMPT, THOUGHT], ids=["plain prompt", "prompt that opens a thought"])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_tool_calls_are_trained_in_the_templates_own_format(kind: str, prompt: str) -> None:
    whole, learned = trained(TEMPLATES[kind].replace("PROMPT", prompt), TALK)
    said = "hm" if kind == "keeps the content" else ""
    closed = "</think>\n\n" if prompt is THOUGHT else ""  # otherwise call and answer would be part of the thought
    assert learned == f'{closed}{said}<tool_call>{{"x": "2+2"}}</tool_call><|im_end|>{closed}4<|im_end|>'
    assert whole.startswith("1<|im_start|>"), "the prompt names the tools, as in a rollout"
    assert "<|im_start|>tool\n4<|im_end|>" in whole


def test_a_template_that_cannot_show_a_tool_call_is_refused() -> None:
    with pytest.raises(UserError, match="leaves out tool calls"):
        trained(byte_tokenizer("chatml").chat_template, TALK)
