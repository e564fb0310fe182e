"""A simulated user played by a language model: any model of the `models/` layer.

It sees the task, the hidden goal and the history, and answers with `{current_answer, thought, response}`. Its state
lives in `conversation.session['user']`; the object itself only counts, so it serves all conversations at once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from upshot.config.bounds import Count, NonNegative, Share, Whole
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, derive_seed
from upshot.models.base import Model, ModelCallError
from upshot.tasks.base import last_reply
from upshot.tasks.participants.ask import Flaw, ModelAnswer, ask, text_schema
from upshot.tasks.participants.base import Observation, User, find_model, users
from upshot.tasks.participants.templates import as_lines, as_text, render, task_of
from upshot.tasks.users.noise import mistype
from upshot.tasks.users.personas import VAGUENESS, check_persona, choose_persona
from upshot.tasks.users.quality import copied_share, is_early_end, is_role_flip

END_SIGNAL = "[[TERMINATE CHAT]]"
SIGNAL_VARIABLE = "COLLABLLM_TERMINATION_SIGNAL"
"""The environment variable that CollabLLM takes another signal from."""
SCHEMA = text_schema("current_answer", "thought", "response")
_NAMES = {"user": "You", "assistant": "Assistant", "tool": "Tool"}


@users.register("llm")
class LLMUser(User):
    """A language model that plays the person with the hidden goal."""

    def __init__(
        self,
        model: Any = "user",
        models: Mapping[str, Model] | None = None,
        task_description: str = "",
        persona: str | list[str] = "plain",
        vagueness: Literal["low", "medium", "high"] = "medium",
        end_signal: str = "",
        template: str = "user",
        temperature: NonNegative = 1.0,
        max_tokens: Count = 512,
        repairs: Whole = 2,
        paste_share: Share = 0.5,
        noise: Share = 0.0,
        seed: Whole = 0,
        task: Any = None,
    ) -> None:
        """Make the user.

        model: a `Model`, or the name of one among the recipe's `models`.
        task_description: what conversations are about (default: the task's description); a row's `meta['task_desc']`
            takes precedence.
        persona: a name of `personas.PERSONAS`, 'mixed', a list to draw from by row, or a description in words.
        vagueness: how much the user says without being asked.
        end_signal: what the user writes to leave (default: $COLLABLLM_TERMINATION_SIGNAL, else [[TERMINATE CHAT]]).
        template: name or path (.j2) of the prompt.
        repairs: how often an unusable or out-of-role answer is requested again.
        paste_share: share of copied word 6-grams (`quality.copied_share`) at which a message counts as a pasted goal.
        noise: share of words that the user mistypes.
        seed: seed for drawing personas.
        """
        check_persona(persona)
        self.model = find_model("the user 'llm'", model, models or {})
        self.task_description = task_description or str(getattr(task, "description", ""))
        self.persona, self.vagueness, self.seed = persona, VAGUENESS[vagueness], seed
        self.end_signal = end_signal or os.environ.get(SIGNAL_VARIABLE) or END_SIGNAL
        self.template, self.repairs, self.paste_share, self.noise = template, repairs, paste_share, noise
        self.sampling = Sampling(max_tokens=max_tokens, temperature=temperature)

    async def observe(self, conversation: Conversation) -> Observation:
        """The user's next message, or its leaving; `ModelCallError` when the model gives nothing usable."""
        flaws: list[str] = []

        def check(values: Mapping[str, Any]) -> Flaw | None:
            if (missing := next((key for key in SCHEMA["required"] if key not in values), None)) is not None:
                return Flaw("missing_key", f'the key "{missing}" is missing')
            if not isinstance(values["response"], str):
                return Flaw("not_text", '"response" must be text')
            answer = self._measure(conversation, values["response"])
            if not answer.text and not answer.ended:
                return Flaw("empty", '"response" is empty')
            if answer.flip:
                return Flaw("role_flip", "it talks like the assistant; you are the person who wants something", False)
            if answer.overlap >= self.paste_share:
                return Flaw("goal_pasted", "it copies the goal; say it in your own words and leave details out", False)
            return None

        seed = derive_seed(conversation.seed, "user", len(conversation.turns))
        sampling = Sampling(self.sampling.max_tokens, self.sampling.temperature, seed=seed)
        prompt = self.prompt(conversation)
        try:
            answer = await ask(self.model, prompt, SCHEMA, check, sampling, "user", self.repairs, flaws)
        except ModelCallError as error:
            metrics = {**attempt_metrics(flaws), "user_failed": 1.0}
            self._counts.update(metrics)
            conversation.count(metrics)
            raise ModelCallError(f"user {error.reason}", str(error)) from error
        return self._observation(conversation, answer)

    def prompt(self, conversation: Conversation) -> str:
        """What the model is shown of a conversation."""
        _, persona = choose_persona(self.persona, conversation.row, self.seed)
        return render(
            self.template,
            persona=persona,
            task=task_of(conversation, self.task_description),
            goal=as_text(conversation.row.goal),
            vagueness=self.vagueness,
            end_signal=self.end_signal,
            history=as_lines(conversation.messages, _NAMES),
        )

    def stats(self) -> dict[str, float]:
        """Totals of the quality counters since the start, and the rates that can be compared between runs."""
        totals = super().stats()
        turns, ends = totals.get("user_turns", 0.0), totals.get("user_ended", 0.0)
        if turns:
            for name in ("user_role_flip", "user_goal_pasted", "user_goal_overlap"):
                totals[f"{name}_rate"] = totals.get(name, 0.0) / turns
        if ends:
            totals["user_ended_early_rate"] = totals.get("user_ended_early", 0.0) / ends
        return totals

    def _observation(self, conversation: Conversation, answer: ModelAnswer) -> Observation:
        current = as_text(answer.values["current_answer"])
        heard = self._measure(conversation, answer.values["response"])
        metrics = {
            **attempt_metrics(answer.flaws),
            "user_turns": 1.0,
            "user_goal_overlap": heard.overlap,
            "user_goal_pasted": float(heard.overlap >= self.paste_share),
            "user_role_flip": float(heard.flip),
        }
        if heard.ended:
            spoke = conversation.last("assistant") is not None
            metrics["user_ended"] = 1.0
            metrics["user_ended_early"] = float(is_early_end(spoke, current))
        name, _ = choose_persona(self.persona, conversation.row, self.seed)
        before = conversation.session.get("user", {})
        conversation.session["user"] = {"persona": name, "answer": current, "turns": before.get("turns", 0) + 1}
        note = {"current_answer": current, "thought": as_text(answer.values["thought"]), "persona": name}
        flaws = {"flaws": list(answer.flaws)} if answer.flaws else {}
        text = heard.text
        if self.noise:
            drawn = random.Random(derive_seed(conversation.seed, "noise", len(conversation.turns)))
            text = mistype(text, self.noise, drawn)
        return self.reply(text, metrics, note | flaws, heard.ended)

    def _measure(self, conversation: Conversation, response: str) -> UserAnswer:
        text = response.replace(self.end_signal, "").strip()
        flip = is_role_flip(text, last_reply(conversation))
        return UserAnswer(text, self.end_signal in response, flip, copied_share(as_text(conversation.row.goal), text))


@dataclass(frozen=True, slots=True)
class UserAnswer:
    """What a model says as the user, measured."""

    text: str
    ended: bool
    flip: bool
    overlap: float


def attempt_metrics(flaws: Sequence[str]) -> dict[str, float]:
    """Counters of the attempts that were not good enough."""
    broken = sum(flaw in ("bad_json", "truncated", "missing_key", "not_text") for flaw in flaws)
    return {
        "user_asked_again": float(len(flaws)),
        "user_empty": float(flaws.count("empty")),
        "user_broken_json": float(broken),
    }
