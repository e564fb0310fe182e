"""What a recipe may say of classmates, below `futures`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from upshot.rollout.futures.classmates.classmate import ClassmateConfig
from upshot.rollout.futures.classmates.thought_cut import WHOLE_THOUGHT, ThoughtCut

CLASSMATE = "classmate"
"""The part of the reward that classmates give, and the name of their verdicts."""
Kind = Literal["vanilla", "without-thought", "steps", "other-question", "similar-question"]
Gate = Literal["always", "no_classmate", "no_classmate_when_main_incorrect", "neg_classmate_when_main_incorrect"]


@dataclass(frozen=True)
class ClassmatesOptions:
    """The options of the futures `classmates`."""

    classmates: list[ClassmateConfig]
    """Names among the recipe's models, each alone or with weight, think, tokenizer, system."""
    samples: int = 1
    """Answers of each classmate to each thought."""
    rounds: int = 0
    """Rounds of talk for the main reward; 0: none."""
    keep: ThoughtCut = WHOLE_THOUGHT
    """How much of the thought is handed on: a share, [low, high] drawn by reply, first-K-tokens, last-K-tokens."""
    mode: Literal["answer", "continue"] = "answer"
    """Answer at once, or continue the thought first."""
    reward: Kind = "vanilla"
    """What the classmates' scores are taken as: see `futures.py`."""
    measure: Literal["sampled", "likelihood", "mixed"] = "sampled"
    """Sampled answers, the likelihood of the reference answer, or both."""
    mix: float = 0.5
    """measure mixed: the likelihood's share."""
    cuts: int = 4
    """reward steps: into so many stretches the thought is cut."""
    weight: float = 1.0
    """Of the classmate part."""
    gate: Gate = "always"
    """When the part counts, by whether the main answer is right."""
    right_from: float = 1.0
    """gate: the main verdict from which an answer is right."""
    tokens: Literal["kept", "all"] = "kept"
    """kept: the thought that was handed on earns the part. all: every token does."""
    similar_by: Literal["words", "key"] = "words"
    """reward similar-question: found by its words (tf-idf), or by the task's own key."""
    metric: str = "verifier"
    """What scores a classmate's answer: one of `reward.metrics`, as it stands there, or another metric by name."""
    max_tokens: int = 512
    """Most tokens of a classmate's answer."""
    temperature: float = 1.0
    """Of the classmates."""

    @property
    def likelihood_share(self) -> float:
        """How much of a score is the likelihood of the reference answer, from 0 to 1."""
        return {"sampled": 0.0, "likelihood": 1.0, "mixed": self.mix}[self.measure]

    @property
    def stretches(self) -> int:
        """Into how many stretches the thought is cut."""
        return self.cuts if self.reward == "steps" else 1

    @property
    def has_baselines(self) -> bool:
        """Whether a score counts as the gain over what a classmate reaches without the thought."""
        return self.reward in ("without-thought", "steps")

    @property
    def asks_another_question(self) -> bool:
        """Whether the thought is shown before another row's question."""
        return self.reward in ("other-question", "similar-question")

    def part_name(self, stretch: int) -> str:
        """The part of the reward that a stretch of the thought earns."""
        return f"{CLASSMATE} {stretch}" if self.reward == "steps" else CLASSMATE
