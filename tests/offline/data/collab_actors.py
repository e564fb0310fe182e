"""Scripted policy, user and judge for simulated conversations; every goal contains a mark such as MARK-07.

Named on the command line as `scripted:collab_actors:policy`. Everything is a function of the request, so an interrupted
build must give the same result as an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from pathlib import Path

from upshot.models.base import ModelCallError, Request

MARK = re.compile(r"MARK-\d\d")
busy = 0
busiest = 0


def goals(folder: Path, count: int, name: str = "goals.jsonl") -> Path:
    """A file of goals with marks."""
    file = folder / name
    rows = [{"goal": f"Find the number of MARK-{i:02d}.", "reference": f"MARK-{i:02d} is {i}"} for i in range(count)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


async def _linger() -> None:
    global busy, busiest
    busy += 1
    busiest = max(busiest, busy)
    await asyncio.sleep(float(os.environ.get("ACTOR_SECONDS", "0")))
    busy -= 1


def _text(request: Request) -> str:
    return "\n".join(message.content for message in request.prompt)


async def policy(request: Request) -> str:
    """Asks or answers, depending on its seed; with the proactive prompt it always asks. Repeats the mark it heard."""
    await _linger()
    mark = (MARK.findall(_text(request)) or ["?"])[-1]
    rng = random.Random(request.sampling.seed)
    asks = "works together with the user" in request.prompt[0].content or rng.random() < 0.5
    said = f"What more about {mark}?" if asks else f"{mark} it is. " + "So. " * rng.randrange(1, 9)
    return said.strip()


async def user(request: Request) -> str:
    """Mentions its goal's mark, and leaves by chance once it has heard an answer."""
    await _linger()
    text = _text(request)
    mark = MARK.findall(text)[0]
    rng = random.Random(request.sampling.seed)
    leaves = "it is." in text and rng.random() < 0.3
    response = "Thanks! [[TERMINATE CHAT]]" if leaves else f"It is about {mark}, take {rng.randrange(1000)}."
    return json.dumps({"current_answer": "", "thought": "", "response": response})


async def judge(request: Request) -> str:
    """Prefers questions; an answer that was given counts as right."""
    await _linger()
    text = _text(request)
    said = text.split("<conversation>")[-1].split("</conversation>")[0]
    if '"accuracy"' in text:
        return json.dumps({"thought": "", "accuracy": int("it is." in said)})
    if '"asks"' in text:
        return json.dumps({"thought": "", "asks": int("?" in said.split("Assistant:")[-1])})
    return json.dumps({"thought": "", "interactivity": min(1.0, said.count("What more") / 4)})


async def failing_policy(request: Request) -> str:
    """Fails for one goal, and at random for others."""
    if "MARK-01" in _text(request):
        raise ModelCallError("http_500", "told to")
    if random.Random(request.sampling.seed).random() < 0.1:
        raise ModelCallError("timeout")
    return await policy(request)


async def policy_behind_a_cable(request: Request) -> str:
    """The policy while ACTOR_DOWN is not set, otherwise a failure."""
    if os.environ.get("ACTOR_DOWN"):
        raise ModelCallError("connection")
    return await policy(request)


async def failing_judge(request: Request) -> str:
    """Gives no usable rating in a third of the conversations."""
    if random.Random(_text(request)).random() < 0.33:
        return "I would rather not."
    return await judge(request)


def asks(request: Request) -> str:
    """Always asks a question."""
    return "Which one do you mean?"


def answers(request: Request) -> str:
    """Always answers."""
    return "It is the second one."


def coder(request: Request) -> str:
    """Writes a function that adds some number, by its seed."""
    number = random.Random(request.sampling.seed).randrange(3)
    return f"Here it is:\n\n```python\ndef task_func(x):\n    return x + {number}\n```\n"


async def planner(request: Request) -> str:
    """Plans in JSON if asked to, and repeats what it heard."""
    text = _text(request)
    if '"current_problem"' not in text:
        return await policy(request)
    informed = "informed" if "MARK-01 is a street." in text else "guessing"
    limit = re.findall(r"at most (\d+) tokens", text)[0]
    response = f"What more about MARK-01? ({limit} tokens, {informed})"
    return json.dumps({"current_problem": "open", "thought": "ask", "response": response})
