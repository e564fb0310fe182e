"""What other people's clients do with the servers of a serve file. Run by `test_served.py`, where they are installed.

    python -m tests.peers.clients CHECK SERVERS.json        {"hermes": {"url": …, "folder": …}, …}

Prints the versions of what it used. Imports nothing of Upshot.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

KEY = os.environ["UPSHOT_API_KEY"]
ANSWER = "Sunny, the tool says."
QUESTION = "What is the weather in Oslo?"
ASKED = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
Servers = dict[str, dict[str, str]]


def equal(found: Any, wanted: Any) -> None:
    """Fail if two values differ, naming both."""
    if found != wanted:
        raise SystemExit(f"{found!r} is not {wanted!r}")


def true(holds: Any, what: Any) -> None:
    """Fail if something does not hold, naming it."""
    if not holds:
        raise SystemExit(f"not so: {what!r}")


def refused(call: Callable[[], Any], status: int, word: str) -> None:
    """A call must fail in this way, with this message."""
    import openai

    try:
        call()
    except openai.APIStatusError as error:
        equal(error.status_code, status)
        true(word in str(error), str(error))
        return
    raise SystemExit(f"was not refused with {status}")


def with_openai(servers: Servers) -> None:
    """The official client: keys, n, log-probabilities, streams, formats, errors, many at once."""
    from concurrent.futures import ThreadPoolExecutor

    import openai

    client = openai.OpenAI(base_url=servers["hermes"]["url"], api_key=KEY, max_retries=0)
    equal([model.id for model in client.models.list()], ["hermes"])
    refused(lambda: openai.OpenAI(base_url=servers["hermes"]["url"], api_key="no").models.list(), 401, "key")
    refused(lambda: client.chat.completions.create(model="other", messages=ASKED), 404, "no model 'other'")
    refused(lambda: client.embeddings.create(model="hermes", input="words"), 404, "embeddings")
    refused(lambda: client.responses.create(model="hermes", input="words"), 404, "responses")
    done = client.chat.completions.create(
        model="hermes", messages=ASKED, n=3, logprobs=True, top_logprobs=2, temperature=0, max_completion_tokens=9
    )
    equal([choice.index for choice in done.choices], [0, 1, 2])
    equal(len(done.choices[0].logprobs.content[0].top_logprobs), 2)
    equal(done.usage.completion_tokens, 27)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
    said = client.chat.completions.create(model="hermes", messages=ASKED, response_format=form)
    true(json.loads(said.choices[0].message.content) in ("yes", "no"), said)
    scored = client.completions.create(model="hermes", prompt=["one two", "three"], echo=True, logprobs=1, max_tokens=0)
    equal([choice.text for choice in scored.choices], ["one two", "three"])
    equal(scored.choices[0].logprobs.token_logprobs[0], None)

    def ask(seed: int) -> str:
        words = client.completions.create(model="hermes", prompt="a", max_tokens=20, seed=seed)
        return words.choices[0].text

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, range(64)))
    equal(together[:4], [ask(seed) for seed in range(4)])
    for name in servers:
        _tool_loop(openai.OpenAI(base_url=servers[name]["url"], api_key=KEY), name)
    print("openai", version("openai"))


def _tool_loop(client: Any, name: str) -> None:
    """Call, result, answer: at once and streamed."""
    done = client.chat.completions.create(model=name, messages=ASKED, tools=[WEATHER], temperature=0)
    message, finish = done.choices[0].message, done.choices[0].finish_reason
    equal((finish, message.tool_calls[0].function.name), ("tool_calls", "weather"))
    equal(json.loads(message.tool_calls[0].function.arguments), {"city": "Oslo"})
    if name == "thinker":
        equal(message.reasoning_content.strip(), "Look.")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    history = [*ASKED, message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(model=name, messages=history, tools=[WEATHER], temperature=0)
    equal((last.choices[0].message.content, last.choices[0].finish_reason), (ANSWER, "stop"))
    arguments, thought, finishes = "", "", []
    options = {"stream_options": {"include_usage": True}}
    stream = client.chat.completions.create(
        model=name, messages=ASKED, tools=[WEATHER], temperature=0, stream=True, **options
    )
    for chunk in stream:
        for choice in chunk.choices:
            finishes += [choice.finish_reason] if choice.finish_reason else []
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            arguments += "".join(call.function.arguments or "" for call in choice.delta.tool_calls or ())
    equal((json.loads(arguments), finishes), ({"city": "Oslo"}, ["tool_calls"]))
    equal(thought.strip(), "Look." if name == "thinker" else "")
    equal(chunk.usage.total_tokens, done.usage.total_tokens)
    forced = client.chat.completions.create(model=name, messages=ASKED, tools=[WEATHER], tool_choice="required")
    equal(forced.choices[0].message.tool_calls[0].function.name, "weather")


def with_litellm(servers: Servers) -> None:
    """litellm's completion: tools, streams, thoughts, text."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network when it is imported
    import litellm

    for name, server in servers.items():
        asked = {"model": f"openai/{name}", "api_base": server["url"], "api_key": KEY, "temperature": 0}
        done = litellm.completion(**asked, messages=ASKED, tools=[WEATHER])
        [call] = done.choices[0].message.tool_calls
        equal(json.loads(call.function.arguments), {"city": "Oslo"})
        if name == "thinker":
            equal(done.choices[0].message.reasoning_content.strip(), "Look.")
        chunks = list(litellm.completion(**asked, messages=ASKED, tools=[WEATHER], stream=True))
        whole = litellm.stream_chunk_builder(chunks, messages=ASKED)
        equal(whole.choices[0].message.tool_calls[0].function.arguments, call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        history = [*ASKED, done.choices[0].message.model_dump(), result]
        equal(litellm.completion(**asked, messages=history, tools=[WEATHER]).choices[0].message.content, ANSWER)
    words = litellm.text_completion(
        model="text-completion-openai/hermes", api_base=servers["hermes"]["url"], api_key=KEY, prompt="a", max_tokens=3
    )
    said = words.usage.completion_tokens
    true(said == 3 or (0 < said < 3 and words.choices[0].finish_reason == "stop"), words)  # sampled: it may end early
    print("litellm", version("litellm"))


def with_lm_eval(servers: Servers) -> None:
    """lm-eval's own harness on a task of three rows: loglikelihoods of choices, and generation."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    os.environ["OPENAI_API_KEY"] = KEY
    folder = Path(tempfile.mkdtemp())
    rows = [{"question": f"{n} and {n} is", "choices": [f" {2 * n}", f" {n}"], "answer": 0} for n in (1, 2, 3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
        'doc_to_text: "{{question}}"\n'
    )
    (folder / "pick.yaml").write_text(
        f"task: pick\noutput_type: multiple_choice\n{common}doc_to_choice: choices\ndoc_to_target: answer\n"
        "metric_list: [{metric: acc}]\n"
    )
    (folder / "say.yaml").write_text(
        f'task: say\noutput_type: generate_until\n{common}doc_to_target: "{{{{choices[0]}}}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}\nmetric_list: [{metric: exact_match}]\n'
    )
    server = servers["hermes"]
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    arguments = {"model": "hermes", "tokenizer": server["folder"], "num_concurrent": 2, "max_length": 512}
    done = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={**arguments, "base_url": server["url"] + "/completions", "tokenizer_backend": "huggingface"},
        tasks=["pick", "say"],
        task_manager=manager,
    )
    equal(sorted(done["results"]), ["pick", "say"])
    true(0 <= done["results"]["pick"]["acc,none"] <= 1, done["results"])
    chat = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args={**arguments, "base_url": server["url"] + "/chat/completions"},
        tasks=["say"],
        task_manager=manager,
        apply_chat_template=True,
    )
    equal(chat["samples"]["say"][0]["resps"][0][0], "<tool_ca")
    print("lm_eval", version("lm_eval"))


def with_agents(servers: Servers) -> None:
    """openai-agents' loop: the tool is called and its result answered."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    cold = ModelSettings(temperature=0)
    asked: list[str] = []

    @function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    for name, server in servers.items():
        model = OpenAIChatCompletionsModel(name, AsyncOpenAI(base_url=server["url"], api_key=KEY))
        agent = Agent(
            name="agent", instructions="Answer with the tool.", model=model, tools=[weather], model_settings=cold
        )
        equal(Runner.run_sync(agent, QUESTION).final_output, ANSWER)
    equal(asked, ["Oslo"] * len(servers))
    print("openai-agents", version("openai-agents"))


def with_pydantic_ai(servers: Servers) -> None:
    """pydantic-ai's loop, at once and streamed."""
    import asyncio

    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def streamed(agent: Any) -> str:
        async with agent.run_stream(QUESTION) as result:
            return str(await result.get_output())

    for name, server in servers.items():
        model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=server["url"], api_key=KEY))
        agent: Any = Agent(model, instructions="Answer with the tool.", model_settings={"temperature": 0})

        @agent.tool_plain
        def weather(city: str) -> str:
            """The weather in a city."""
            return "sunny in " + city

        equal(agent.run_sync(QUESTION).output, ANSWER)
        equal(asyncio.run(streamed(agent)), ANSWER)
    print("pydantic-ai", version("pydantic-ai-slim"))


def with_smolagents(servers: Servers) -> None:
    """smolagents' client, whose agents end by calling a tool, in a single step."""
    from smolagents import OpenAIServerModel, tool

    @tool
    def weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: The city.
        """
        return "sunny in " + city

    for name, server in servers.items():
        model = OpenAIServerModel(name, api_base=server["url"], api_key=KEY, temperature=0)
        said = model.generate(
            [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}], tools_to_call_from=[weather]
        )
        equal(said.tool_calls[0].function.name, "weather")
    print("smolagents", version("smolagents"))


CHECKS = {
    "openai": with_openai,
    "litellm": with_litellm,
    "lm_eval": with_lm_eval,
    "agents": with_agents,
    "pydantic_ai": with_pydantic_ai,
    "smolagents": with_smolagents,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
