"""An agent program: it calls the policy as often as it likes, rewrites its context, and reports the reward.

A customer of the shop wants something and does not say everything at once. The agent asks the policy what to say. If
that is a question, it gets the customer's answer, writes what it knows into one new message (the old context is gone),
and asks the policy again. Any program that uses OpenAI's chat API can take its place.

    upshot train examples/agent.yaml
    upshot train examples/agent.yaml episode.agent='python examples/agent.py'     # the same as a program for every row
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

SLOTS = ("size", "colour", "thing")


def play(episode: Any) -> float:
    """One episode, played by a function: it returns the reward. It waits for answers, so it runs in a thread."""
    return talk(episode.to_dict())


def talk(episode: dict[str, Any]) -> float:
    """The agent itself: 1 if the customer gets what they wanted."""
    row = episode["row"]
    request = row["messages"][-1]["content"]
    reply = ""
    for _ in range(3):
        reply = ask(episode, [{"role": "user", "content": request}])
        asked = [slot for slot in SLOTS if slot in reply.split()] if reply.startswith("which") else []
        if not asked:
            break
        known = [slot for slot in SLOTS if slot in asked or row["goal"][slot] in request.split()]
        what = "a" if "thing" in known else "something"
        request = f"i want {what} {' '.join(row['goal'][slot] for slot in known)}"
    return float(reply == row["reference"])


def ask(episode: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """What the policy says to these messages."""
    body = {"model": episode["model"], "messages": messages}
    answer = post(f"{episode['base_url']}/chat/completions", episode["api_key"], body)
    return str(answer["choices"][0]["message"]["content"])


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    """The JSON answer to a POST."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    post(given["reward_url"], given["reward_key"], {"reward": talk(given)})
