"""Agents and the server: tool calls and thoughts from a real engine with scripted text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.conftest import tiny_llama
from tests.serving.openai.test_server import serving
from upshot.engine.engine import Engine
from upshot.models.engine_model import EngineModel
from upshot.models.openai_format import read_answer
from upshot.serving.openai.format import ChatRequest
from upshot.serving.openai.server import OpenAIServer

openai = pytest.importorskip("openai")

TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    + TURN
    + "{{ m.content }}{% for c in m.tool_calls %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = CHATML.replace(
    "CALL",
    "{% if m.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>',
)
LLAMA3 = CHATML.replace(
    "CALL",
    "{# <|start_header_id|> ipython #}{% if not loop.first %}; {% endif %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
)
MISTRAL = CHATML.replace("CALL", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}")
OPENED = HERMES.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}") + "{# </think> #}"
THINKS = HERMES + "{# <think> </think> #}"

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
NORTH = {"name": "weather", "arguments": {"city": "Tromsø", "days": 2}}
SOUTH = {"name": "weather", "arguments": {"city": "Rome"}}


def weather(name: str = "weather") -> dict[str, Any]:
    place = {"$defs": {"Place": {"enum": ["Rome", "Oslo"]}}, "type": "object", "required": ["city"]}
    parameters = {**place, "properties": {"city": {"$ref": "#/$defs/Place"}}, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "The weather.", "parameters": parameters}}


def hermes(*calls: dict[str, Any]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)


def llama3(*calls: dict[str, Any]) -> str:
    renamed = [{"name": call["name"], "parameters": call["arguments"]} for call in calls]
    return "; ".join(json.dumps(call, ensure_ascii=False) for call in renamed)


def mistral(*calls: dict[str, Any]) -> str:
    return "".join(
        f"[TOOL_CALLS]{call['name']}[ARGS]{json.dumps(call['arguments'], ensure_ascii=False)}" for call in calls
    )


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.chat_template = template
    return fast


class Script:
    """A grammar that allows only one text."""

    def __init__(self, ids: Sequence[int], vocab: int) -> None:
        self.ids, self.at, self.vocab = ids, 0, vocab

    def allowed(self) -> np.ndarray:
        mask = np.zeros((self.vocab + 31) // 32, np.uint32)
        token = self.ids[self.at]
        mask[token // 32] = 1 << (token % 32)
        return mask

    def accept(self, token: int) -> bool:
        self.at += 1
        return self.at == len(self.ids)

    def copy(self) -> Script:
        raise NotImplementedError


class Scripted(EngineModel):
    """Generates the given text, if any, and records what it was asked."""

    said = ""
    prompts: list[list[int]]

    def _grammar(self, request: Any) -> Any:
        self.prompts = [*getattr(self, "prompts", []), list(request.prompt)]
        if not self.said:
            return super()._grammar(request)
        ids = self.tokenizer.encode(self.said + "<|im_end|>", add_special_tokens=False)
        return lambda: Script(ids, self.engine.shape.vocab)


class Agent:
    """A server of one dialect, with a client."""

    def __init__(self, template: str) -> None:
        self.model = Scripted(Engine(tiny_llama(vocab_size=262, num_hidden_layers=1)), tokenizer_of(template), "tiny")
        self.server = OpenAIServer(self.model)
        self.url = ""
        self.client: Any = None

    def ask(self, said: str = "", messages: Any = None, **over: Any) -> Any:
        self.model.said = said
        asked = {"model": "tiny", "messages": messages or [{"role": "user", "content": "hi"}], "max_tokens": 400}
        return self.client.chat.completions.create(**{**asked, "tools": [weather()], "seed": 1, **over})


TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "plain": CHATML, "think": THINKS, "open": OPENED}
FAMILIES = {"hermes": hermes, "llama3": llama3, "mistral": mistral}


@pytest.fixture(scope="module")
def agents() -> Iterator[dict[str, Agent]]:
    made = {name: Agent(template) for name, template in TEMPLATES.items()}
    first = made["hermes"]
    for name, agent in made.items():  # one listening socket serves them all
        if agent is not first:
            first.server.app.mount(f"/{name}", agent.server.app)
    with serving(first.server) as url:
        for name, agent in made.items():
            agent.url = url if agent is first else f"{url}/{name}"
            agent.client = openai.OpenAI(base_url=agent.url + "/v1", api_key="none", max_retries=0)
        yield made
        for agent in made.values():
            agent.client.close()


def calls_in(message: Any) -> list[dict[str, Any]]:
    functions = [call.function for call in message.tool_calls or ()]
    return [{"name": function.name, "arguments": json.loads(function.arguments)} for function in functions]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_official_client_calls_tools_and_sends_their_answers_back(agents: dict[str, Agent], family: str) -> None:
    agent, said = agents[family], FAMILIES[family](NORTH, SOUTH)
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    [choice] = agent.ask(said, messages).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert calls_in(choice.message) == [NORTH, SOUTH] and len({call.id for call in choice.message.tool_calls}) == 2
    first = agent.model.prompts[-1]
    messages.append(choice.message.model_dump())
    messages += [{"role": "tool", "tool_call_id": c.id, "content": "sun"} for c in choice.message.tool_calls]
    [after] = agent.ask("It is sunny.", messages).choices
    assert after.message.content == "It is sunny." and after.finish_reason == "stop" and not after.message.tool_calls
    # The call comes back exactly as it was sampled, followed by the tools' answers.
    text = agent.model.tokenizer.decode(agent.model.prompts[-1])
    assert text.startswith(agent.model.tokenizer.decode(first) + said + "<|im_end|>\n<|im_start|>tool\nsun")
    assert '"description": "The weather."' in text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", ["two", "words", "none", "broken", "cut"])
def test_a_stream_of_calls_is_the_whole_answer(agents: dict[str, Agent], family: str, shape: str) -> None:
    write = FAMILIES[family]
    said = {"two": write(NORTH, SOUTH), "words": "Ich schaue naß 🙂. " + hermes(NORTH) + " So."}
    said |= {"none": " Hello <tool_ [TOOL {\n", "broken": write(NORTH).replace("}", "é"), "cut": write(NORTH, SOUTH)}
    agent = agents[family]
    over = {"max_tokens": len(agent.model.tokenizer.encode(write(NORTH))) + 6} if shape == "cut" else {}
    [whole] = agent.ask(said[shape], **over).choices
    chunks = [chunk.choices[0] for chunk in agent.ask(said[shape], stream=True, **over)]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [whole.finish_reason]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (whole.message.content or "")
    assert [call for chunk in chunks for call in calls_in(chunk.delta)] == calls_in(whole.message)
    sent = [call.index for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert sent == list(range(len(sent)))
    if shape == "two":
        assert calls_in(whole.message) == [NORTH, SOUTH]
    if shape in ("none", "broken"):
        assert whole.message.content == said[shape]
    if shape == "cut":
        assert whole.finish_reason == "length" and calls_in(whole.message)[0] == NORTH


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "storm"}}])
def test_a_required_call_is_made_whatever_the_weights(agents: dict[str, Agent], name: str, choice: Any) -> None:
    pytest.importorskip("llguidance")
    over = {"tools": [weather(), weather("storm")], "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(2):
        [made] = agents[name].ask(**over, seed=seed).choices
        [call] = calls_in(made.message)
        assert made.finish_reason == "tool_calls" and not made.message.content
        assert call["name"] in (("weather", "storm") if choice == "required" else ("storm",))
        assert call["arguments"]["city"] in ("Rome", "Oslo")


def test_a_required_call_has_the_templates_format(agents: dict[str, Agent]) -> None:
    pytest.importorskip("llguidance")
    asked = ChatRequest(messages=[{"role": "user", "content": "hi"}], tools=[weather()], tool_choice="required")
    array = "[TOOL_CALLS][" + json.dumps(SOUTH) + "]"
    old = OpenAIServer(agents["mistral"].model, tool_parser="mistral")
    agents["mistral"].model.said = ""  # what another test made it say
    for server, form, other in ((agents["mistral"].server, mistral(SOUTH), array), (old, array, mistral(SOUTH))):
        grammar = server.model._grammar(server._prepare(asked)[0])()
        ids = [server.model.tokenizer.encode(text, add_special_tokens=False) for text in (form, other)]
        assert grammar.copy().matcher.validate_tokens(ids[1]) < len(ids[1])
        for token in ids[0]:
            grammar.accept(token)
        assert grammar.accept(2)


def test_a_required_call_may_follow_a_thought(agents: dict[str, Agent]) -> None:
    pytest.importorskip("llguidance")
    for name, thought in (("think", "<think>\nhm\n</think>\n\n"), ("open", "hm </think>\n"), ("think", "")):
        model, server = agents[name].model, agents[name].server
        asked = ChatRequest(messages=[{"role": "user", "content": "hi"}], tools=[weather()], tool_choice="required")
        model.said = ""
        grammar = model._grammar(server._prepare(asked)[0])()
        calls = hermes(
            {"name": "weather", "arguments": {"city": "Rome"}}, {"name": "weather", "arguments": {"city": "Oslo"}}
        )
        for token in model.tokenizer.encode(thought + calls, add_special_tokens=False):
            assert not grammar.accept(token)
        assert grammar.accept(2)


def test_with_tool_choice_none_tools_are_neither_shown_nor_parsed(agents: dict[str, Agent]) -> None:
    agent = agents["hermes"]
    [choice] = agent.ask(hermes(NORTH), tool_choice="none").choices
    assert choice.message.content == hermes(NORTH) and choice.finish_reason == "stop" and not choice.message.tool_calls
    assert "The weather" not in agent.model.tokenizer.decode(agent.model.prompts[-1])


def test_without_parallel_calls_only_the_first_counts(agents: dict[str, Agent]) -> None:
    [choice] = agents["hermes"].ask(hermes(NORTH, SOUTH), parallel_tool_calls=False).choices
    assert calls_in(choice.message) == [NORTH]


def test_a_template_that_writes_no_calls_leaves_them_in_the_text_unless_a_parser_is_named(
    agents: dict[str, Agent],
) -> None:
    agent = agents["plain"]
    [choice] = agent.ask(hermes(NORTH)).choices
    assert choice.message.content == hermes(NORTH) and not choice.message.tool_calls
    with pytest.raises(openai.BadRequestError, match="--tool-parser"):
        agent.ask(tool_choice="required")
    assert OpenAIServer(agent.model, tool_parser="mistral").dialect.parser is not None


@pytest.mark.parametrize("name", ["think", "open"])
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_come_as_reasoning_content(agents: dict[str, Agent], name: str, stream: bool) -> None:
    agent = agents[name]
    said = ("<think>" if name == "think" else "") + "\nIs it “4”? <tool_call>\n</think>\n\nFour.\n\n" + hermes(SOUTH)
    made = agent.ask(said, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in made]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
        calls = [call for delta in deltas for call in calls_in(delta)]
    else:
        message = made.choices[0].message
        thought, content, calls = message.reasoning_content, message.content, calls_in(message)
    assert (thought, content, calls) == ("Is it “4”? <tool_call>", "Four.", [SOUTH])


def test_an_unfinished_thought_is_not_an_answer(agents: dict[str, Agent]) -> None:
    [choice] = agents["open"].ask("on and on", tools=[]).choices
    assert choice.message.reasoning_content == "on and on" and choice.message.content == ""


def test_a_thought_is_rendered_again_for_a_model_that_thinks(agents: dict[str, Agent]) -> None:
    said = {"role": "assistant", "content": "Four.", "reasoning_content": "hm"}
    messages = [{"role": "user", "content": "2+2?"}, said, {"role": "user", "content": "Sure?"}]
    for name, seen in (("think", True), ("plain", False)):
        agents[name].ask("Yes.", messages)
        text = agents[name].model.tokenizer.decode(agents[name].model.prompts[-1])
        assert ("<think>\nhm\n</think>\n\nFour.<|im_end|>" in text) is seen and "Four." in text


def test_with_a_schema_the_whole_text_conforms_and_markers_in_it_are_not_parsed(agents: dict[str, Agent]) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["<think>a</think>"]}}}
    [choice] = agents["open"].ask(response_format=form, tools=[]).choices
    assert choice.message.content == '"<think>a</think>"'


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"tool_choice": "required", "tools": []}, "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "wether"}}}, "did you mean 'weather'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools.0.function has no name"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "cannot be combined"),
    ],
)
def test_a_choice_of_tools_that_makes_no_sense_is_refused_by_name(
    agents: dict[str, Agent], over: dict[str, Any], word: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        agents["hermes"].ask(**over)


def test_litellm_gets_calls_and_thoughts(agents: dict[str, Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="litellm needs it where tools are given")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it goes to the network when it is imported
    litellm = pytest.importorskip("litellm")
    agent = agents["think"]
    agent.model.said = "<think>\nhm\n</think>\n\n" + hermes(NORTH, SOUTH)
    asked = {"model": "openai/tiny", "api_base": agent.url + "/v1", "api_key": "none", "tools": [weather()]}
    messages = [{"role": "user", "content": "hi"}]
    whole = litellm.completion(messages=messages, **asked)
    built = litellm.stream_chunk_builder(list(litellm.completion(messages=messages, stream=True, **asked)))
    for answer in (whole, built):
        [choice] = answer.choices
        assert calls_in(choice.message) == [NORTH, SOUTH] and choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content == "hm"


def test_our_own_client_receives_the_calls(agents: dict[str, Agent]) -> None:
    agents["hermes"].model.said = hermes(NORTH)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [weather()], "max_tokens": 300}
    [done] = read_answer(
        httpx.post(agents["hermes"].url + "/v1/chat/completions", json=body, timeout=None).json()
    ).completions
    assert done.finish == "tool_calls" and done.tool_calls[0]["function"]["name"] == "weather" and done.text == ""
