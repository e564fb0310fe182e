"""How a run tells a person what it is doing; the console's version draws, this one is silent."""

from __future__ import annotations

from collections.abc import Mapping


class Reporter:
    """Told of phases, steps and messages; says nothing."""

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """A phase of `total` steps begins (or goes on after `done`)."""

    def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """A step is finished."""

    def show_reply(self, step: int, heard: str, reply: str, reward: str) -> None:
        """A reply of the step, now and then: what it answers, its words, its reward."""

    def show_progress(self, done: int, total: int) -> None:
        """Replies played in the running step."""

    def say(self, text: str) -> None:
        """A line worth reading."""

    def close(self) -> None:
        """The run is over."""
