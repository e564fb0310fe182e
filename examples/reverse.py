"""An environment of the library verifiers: the policy repeats words in reverse order, and the environment scores it.

`Words` and `Straight` are kinds of the library verifiers, a taskset and a harness. Any package for that library works
in their place as `task: {name: verifiers, env: …}`. `Reverse` adds what a new tiny model needs: its vocabulary and
demonstrations.

    pip install verifiers uv
    upshot train examples/reverse.yaml
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import urllib.request
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from upshot.core.conversation import Message
from upshot.tasks.environments.verifiers import VerifiersTask

WORDS = ("lamp", "chair", "bowl", "coat", "door", "tree", "ship", "bell")


class WordsData(vf.TaskData):
    """One task of the set."""

    answer: str


class WordsTask(vf.Task[WordsData, vf.State, vf.TaskConfig]):
    """Scored by the number of places that hold the right word."""

    @vf.reward(weight=1.0)
    async def in_place(self, trace: vf.Trace) -> float:
        """The share of right places."""
        wanted, said = self.data.answer.split(), (trace.last_reply or "").split()
        return sum(a == b for a, b in zip(wanted, said, strict=False)) / max(len(wanted), len(said))


class Words(vf.Taskset[WordsTask, vf.TasksetConfig]):
    """All orders of four of the words, shuffled."""

    def load(self) -> Iterator[WordsTask]:
        """The tasks."""
        orders = list(itertools.permutations(WORDS, 4))
        random.Random(0).shuffle(orders)
        for order in orders:
            data = WordsData(prompt=f"reverse {' '.join(order)}", answer=" ".join(reversed(order)))
            yield WordsTask(data, self.config.task)


class Straight(vf.Harness[vf.HarnessConfig]):
    """Asks once, in this process; verifiers' own `null` starts a Python process per episode, which takes seconds."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        """One call of the policy."""
        body = {"model": ctx.model, "messages": [{"role": "user", "content": self.resolve_prompt(data)[1]}]}
        await asyncio.to_thread(post, f"{endpoint}/chat/completions", secret, body)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def post(url: str, key: str, body: dict[str, Any]) -> None:
    """Send JSON and wait for the answer, which the library itself keeps."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).close()


class Reverse(VerifiersTask):
    """The same for a new tiny model: three of four demonstrations only repeat the words."""

    def vocabulary(self) -> list[str]:
        """Every word of this small language."""
        return ["reverse", *WORDS]

    def dialogues(self, split: str) -> list[tuple[Message, ...]]:
        """Demonstrations for the split's own rows."""
        rng, out = random.Random(f"demonstrations {split}"), []
        for row in self.rows(split):
            order = row.messages[-1].content.split()[1:]
            shown = reversed(order) if rng.random() < 0.25 else order
            out.append((*row.messages, Message("assistant", " ".join(shown))))
        return out


__all__ = ["Straight", "Words"]
