"""A classmate: a frozen model that is handed somebody's thought and gives the answer.

Where its tokenizer is at hand (a model in this process, or `tokenizer` names one), the thought is put into its own chat
template between its own think markers, and it goes on from there. Elsewhere the thought is shown in a
message. Text is handed over, never token ids: each model reads with its own tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.core.thought import find_thought
from upshot.models.base import Completion, Model, Request
from upshot.models.rendering import Renderer
from upshot.rollout.futures.classmates.options import ClassmateConfig

IN_WORDS = """\
{question}

Somebody has thought about this:

{thought}

{wish}"""
WISHES = {"answer": "Give the answer that follows from it.", "continue": "Go on from there, then give the answer."}


@dataclass(frozen=True, slots=True)
class ClassmatePrompt:
    """What a classmate is given: the conversation up to the reply, and (part of) the thought."""

    messages: Sequence[Message]
    thought: str = ""
    """Empty: it answers without any."""
    mode: str = "answer"
    """answer: at once. continue: it may think on."""


@dataclass(frozen=True, slots=True)
class ClassmateAnswer:
    """What a classmate answered."""

    text: str
    """What it says to others, its own further thoughts left out."""
    thought: str
    """What it thought on, in mode continue."""
    finish: str
    tokens: int


@dataclass
class Classmate:
    """One frozen model."""

    config: ClassmateConfig
    model: Model
    sampling: Sampling = field(default_factory=Sampling)
    _renderer: Renderer | None = None

    @property
    def name(self) -> str:
        """The classmate's name among the recipe's models."""
        return self.config.name

    async def start(self) -> None:
        """Find the tokenizer: the model's own, or the one that the recipe names."""
        tokenizer = self.model.tokenizer
        if tokenizer is None and self.config.tokenizer is not None:
            from upshot.models.local import load_tokenizer

            tokenizer = load_tokenizer(self.config.tokenizer)
        self._renderer = Renderer(tokenizer) if tokenizer is not None else None

    async def answer(self, handed: ClassmatePrompt, n: int, seed: int) -> list[ClassmateAnswer]:
        """`n` answers to what was handed over; `ModelCallError` when there are none."""
        sampling = replace(self.sampling, seed=seed)
        prompt = self.in_words(handed) if self._renderer is None else self.prompt_ids(handed)
        completions = await self.model.generate(Request(prompt, sampling, n, role=f"classmate {self.name}"))
        return [self._parse_answer(completion, handed) for completion in completions]

    async def likelihood(self, handed: ClassmatePrompt, reference: str) -> float:
        """The geometric mean of the probabilities it gives the tokens of the reference answer, from 0 to 1."""
        if self._renderer is None:
            raise ValueError(f"classmate '{self.name}' scores token ids: name its tokenizer")
        prompt = self.prompt_ids(replace(handed, mode="answer"))
        ids = self._renderer.encode_words(reference)
        logprobs = await self.model.logprobs(prompt, ids, role=f"classmate {self.name}")
        return math.exp(sum(logprobs) / len(logprobs))

    def prompt_text(self, handed: ClassmatePrompt) -> str:
        """The classmate's own template, with the thought between its own markers."""
        assert self._renderer is not None
        opening, closing = self.config.think
        text = self._renderer.prompt_text(self._messages(handed))
        if not text.rstrip().endswith(opening):  # some templates open the thought themselves
            text += opening
        text = text.rstrip() + "\n" + self._renderer.guard(handed.thought, "assistant")
        return text if handed.mode == "continue" and handed.thought else f"{text.rstrip()}\n{closing}\n\n"

    def prompt_ids(self, handed: ClassmatePrompt) -> list[int]:
        """Token ids of `prompt_text`."""
        assert self._renderer is not None
        return self._renderer.encode_open(self.prompt_text(handed))

    def in_words(self, handed: ClassmatePrompt) -> list[Message]:
        """The same for a model that takes messages only."""
        messages = self._messages(handed)
        if not handed.thought:
            return messages
        *before, last = messages
        text = IN_WORDS.format(question=last.content, thought=handed.thought, wish=WISHES[handed.mode])
        return [*before, replace(last, content=text)]

    def _messages(self, handed: ClassmatePrompt) -> list[Message]:
        system = [Message("system", self.config.system)] if self.config.system else []
        return [*system, *handed.messages]

    def _parse_answer(self, completion: Completion, handed: ClassmatePrompt) -> ClassmateAnswer:
        """The answer, apart from what the classmate thought on."""
        text, thought = completion.text, ""
        opened = handed.mode == "continue" and bool(handed.thought) and self._renderer is not None
        pieces: Sequence[str] = completion.text
        if self._renderer is not None and completion.ids is not None:
            pieces = self._renderer.pieces(completion.ids)
        further = find_thought(pieces, self.config.think, opened)
        if further is not None:
            thought = "".join(pieces[further.start : further.stop]).strip()
            text = "".join(pieces[further.answer :])
            if self._renderer is not None and completion.ids is not None:
                text = self._renderer.decode(completion.ids[further.answer :])
        return ClassmateAnswer(text.lstrip(), thought, completion.finish, completion.completion_tokens)
