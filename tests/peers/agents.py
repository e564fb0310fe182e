"""Agents of other people's frameworks as programs of `episode.agent`. Run by `test_agents.py`.

    python -m tests.peers.agents FRAMEWORK < EPISODE.json

Imports nothing of Upshot.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

QUESTION = "What is the weather in Oslo?"
ANSWER = "Sunny, the tool says."
told = json.load(sys.stdin)
MODEL, URL, KEY = told["model"], told["base_url"], told["api_key"]


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city.
    """
    return "sunny in " + city


def with_agents() -> Any:
    """openai-agents' loop."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=URL, api_key=KEY))
    agent = Agent(name="agent", instructions="Answer with the tool.", model=model, tools=[function_tool(weather)])
    return Runner.run_sync(agent, QUESTION).final_output


def with_pydantic_ai() -> Any:
    """pydantic-ai's loop."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    agent: Any = Agent(model, instructions="Answer with the tool.")
    agent.tool_plain(weather)
    return agent.run_sync(QUESTION).output


def with_smolagents() -> Any:
    """smolagents' client, two steps: it writes calls as text, so each is a context of its own."""
    from smolagents import OpenAIServerModel, tool

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY)
    asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    said = model.generate(asked, tools_to_call_from=[tool(weather)])
    [call] = said.tool_calls
    told_again = [*asked, said, {"role": "tool-response", "content": [{"type": "text", "text": weather("Oslo")}]}]
    assert call.function.name == "weather"
    model.generate(told_again)
    return ANSWER


def with_litellm() -> Any:
    """litellm's completion, streamed and whole."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network when it is imported
    import litellm

    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    place = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "tools": tools}
    chunks = list(litellm.completion(**place, messages=asked, stream=True))
    message = litellm.stream_chunk_builder(chunks, messages=asked).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": weather("Oslo")}
    return litellm.completion(**place, messages=[*asked, message.model_dump(), result]).choices[0].message.content


if __name__ == "__main__":
    found = {"agents": with_agents, "pydantic_ai": with_pydantic_ai, "smolagents": with_smolagents}
    answer = (found | {"litellm": with_litellm})[sys.argv[1]]()
    headers = {"Authorization": f"Bearer {told['reward_key']}", "Content-Type": "application/json"}
    body = json.dumps({"reward": float(answer == ANSWER)}).encode()
    urllib.request.urlopen(urllib.request.Request(told["reward_url"], body, headers)).read()
