"""What a recipe may say of classmates, below `futures`: checked by the same system as the recipe's own sections."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import PlainValidator, field_validator, model_validator

from upshot.config.bounds import Count, NonNegative, Share, Whole, Words
from upshot.config.model_spec import check_copy
from upshot.config.recipe import Section
from upshot.config.recipe.episode import ROUNDS, SAMPLES
from upshot.core.thought import MARKERS
from upshot.rollout.futures.classmates.thought_cut import WHOLE_THOUGHT, ThoughtCut

UNMASKED = "unmasked"
"""The name of their verdicts from a thought with the answer still in it (`mask: both`)."""
CLASSMATE = "classmate"
"""The part of the reward that classmates give, and the name of their verdicts."""
Kind = Literal["vanilla", "without-thought", "steps", "other-question", "similar-question"]
Gate = Literal["always", "no_classmate", "no_classmate_when_main_incorrect", "neg_classmate_when_main_incorrect"]
ONLY_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    "mix": ("measure", ("mixed",)),
    "cuts": ("reward", ("steps",)),
    "similar_by": ("reward", ("similar-question",)),
    "right_from": ("gate", ("no_classmate_when_main_incorrect", "neg_classmate_when_main_incorrect")),
}
"""Options that do nothing without another one."""


class ClassmateConfig(Section):
    """One classmate in a recipe: the name of a model, or a mapping with it."""

    short_key: ClassVar[str] = "name"

    name: Words
    """One of the recipe's `models`."""
    weight: NonNegative = 1.0
    """Its share of the mean over classmates; 0: it is asked and logged, and decides nothing."""
    think: tuple[Words, Words] = MARKERS
    """The markers around its thoughts."""
    tokenizer: str | None = None
    """For a model behind an endpoint: folder or Hub name of its tokenizer; None: the thought is shown in a message."""
    system: str = ""
    """A system prompt of its own, put before the row's messages."""

    @field_validator("name")
    @classmethod
    def _is_a_copy(cls, name: str) -> str:
        check_copy(name)
        return name


class ClassmatesOptions(Section):
    """The options of the futures `classmates`."""

    classmates: list[ClassmateConfig]
    """Names among the recipe's models, each alone or with weight, think, tokenizer, system."""
    samples: Count = SAMPLES
    """Answers of each classmate to each thought."""
    rounds: Whole = ROUNDS
    """Rounds of talk for the main reward; 0: none."""
    thought: Literal["marked", "reply"] = "marked"
    """marked: what stands between the markers of `episode.think`. reply: the whole reply is the thought."""
    keep: Annotated[ThoughtCut, PlainValidator(ThoughtCut.parse)] = WHOLE_THOUGHT
    """How much of the thought is handed on: a share, [low, high] drawn by reply, first-K-tokens, last-K-tokens."""
    mask: Literal["none", "answer", "both"] = "none"
    """answer: the final number or letter is cut from what is handed on, so that no thought helps by giving it away.
    both: the same, and every classmate is also asked with the thought as it is, which decides nothing and is logged."""
    mode: Literal["answer", "continue"] = "answer"
    """Answer at once, or continue the thought first."""
    reward: Kind = "vanilla"
    """What the classmates' scores are taken as: see `futures.py`."""
    measure: Literal["sampled", "likelihood", "mixed"] = "sampled"
    """Sampled answers, the likelihood of the reference answer, or both."""
    mix: Share = 0.5
    """measure mixed: the likelihood's share."""
    cuts: Count = 4
    """reward steps: the number of stretches that the thought is cut into."""
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
    metric: Words = "verifier"
    """What scores a classmate's answer: one of `reward.metrics`, as it stands there, or another metric by name."""
    max_tokens: Count = 512
    """Most tokens of a classmate's answer."""
    temperature: NonNegative = 1.0
    """Of the classmates."""

    @field_validator("classmates")
    @classmethod
    def _each_once(cls, named: list[ClassmateConfig]) -> list[ClassmateConfig]:
        names = [config.name for config in named]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"'{twice}' appears twice; name it once, with a weight or more `samples`")
        if not any(config.weight for config in named):
            raise ValueError("name at least one of the recipe's models, with a weight above 0")
        return named

    @model_validator(mode="after")
    def _nothing_idle(self) -> ClassmatesOptions:
        """Refuse options that would do nothing, rather than ignore them."""
        for option, (other, values) in ONLY_WITH.items():
            differs = getattr(self, option) != type(self).model_fields[option].default
            if differs and getattr(self, other) not in values:
                raise ValueError(f"'{option}' does nothing without {other}: {' or '.join(values)}")
        return self

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
