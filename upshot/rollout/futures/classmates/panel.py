"""The classmates of a run and what scores their answers: asked with a prompt, heard as scored futures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from upshot.core.conversation import Conversation, Message, derive_seed
from upshot.core.errors import UserError
from upshot.core.event_loop import at_work
from upshot.core.score import Reason, Score
from upshot.rewards.metric import Metric, score_by
from upshot.rollout.futures.classmates.classmate import Classmate, ClassmateAnswer, ClassmatePrompt
from upshot.rollout.futures.classmates.options import CLASSMATE
from upshot.rollout.reply import Future
from upshot.tasks.base import Task


@dataclass
class Panel:
    """Frozen classmates whose answers are verified, whose likelihood of the reference is measured, or both."""

    classmates: list[Classmate]
    task: Task
    metric: Metric
    """What scores an answer."""
    samples: int = 1
    """Answers to each prompt."""
    likelihood_share: float = 0.0
    """0: sampled answers alone are scored. 1: nothing is sampled, the likelihood of the reference is the score."""

    async def start(self) -> None:
        """Find the classmates' tokenizers."""
        for classmate in self.classmates:
            await classmate.start()

    async def ask(self, classmate: Classmate, prompt: ClassmatePrompt, conversation: Conversation) -> list[Future]:
        """Answers of one classmate as futures of one conversation, scored; a call that fails makes them missing."""
        sampled, wants_likelihood = self.likelihood_share < 1, self.likelihood_share > 0
        row = conversation.row
        reference = self.task.answer_text(row).strip() if wants_likelihood and row.reference is not None else ""
        if wants_likelihood and not reference:
            return self._all_missing(
                conversation, Score.missing(Reason.BAD_ROW, "no reference answer for the likelihood")
            )
        jobs: list[Any] = [classmate.answer(prompt, self.samples, conversation.seed)] if sampled else []
        jobs += [classmate.likelihood(prompt, reference)] if wants_likelihood else []
        try:
            with at_work("futures"):
                results = await asyncio.gather(*jobs)
        except UserError:
            raise
        except Exception as error:
            return self._all_missing(conversation, Score.failed(error, classmate.name))
        answers: list[ClassmateAnswer | None] = results[0] if sampled else [None]
        likelihood = results[-1] if wants_likelihood else 0.0
        scored = (self._score(_fork(conversation, i), answer, likelihood) for i, answer in enumerate(answers))
        return list(await asyncio.gather(*scored))

    def _all_missing(self, conversation: Conversation, failed: Score) -> list[Future]:
        forks = [_fork(conversation, index) for index in range(self.samples if self.likelihood_share < 1 else 1)]
        return [Future(fork, missing=failed.reason, scores={CLASSMATE: failed}) for fork in forks]

    async def _score(self, conversation: Conversation, answer: ClassmateAnswer | None, likelihood: float) -> Future:
        """One answer and its verdict; without an answer the likelihood is the score."""
        if answer is None:
            return Future(conversation, scores={CLASSMATE: Score(likelihood)})
        note = {"finish": answer.finish, "tokens": answer.tokens}
        note |= {"thought": answer.thought} if answer.thought else {}
        conversation.say(Message("assistant", answer.text), note=note)
        return Future(conversation, scores={CLASSMATE: await self._verify(conversation, likelihood)})

    async def _verify(self, conversation: Conversation, likelihood: float) -> Score:
        """The verdict on a sampled answer, mixed with the likelihood of the reference where that is asked for."""
        verdict = await score_by(self.metric, conversation, CLASSMATE)
        share = self.likelihood_share
        if share and verdict.value is not None:
            detail = {**verdict.detail, "sampled": verdict.value, "likelihood": likelihood}
            verdict = Score((1 - share) * verdict.value + share * likelihood, detail=detail)
        return verdict

    async def rescore(self, futures: Sequence[Future]) -> None:
        """Verify answers again that were sampled; a likelihood is taken over as it was measured."""

        async def one(future: Future) -> None:
            likelihood = float(future.scores[CLASSMATE].detail.get("likelihood", 0.0))
            future.scores = {CLASSMATE: await self._verify(future.conversation, likelihood)}

        if self.likelihood_share < 1:
            await asyncio.gather(*map(one, futures))


def _fork(conversation: Conversation, index: int) -> Conversation:
    return Conversation(conversation.row, derive_seed(conversation.seed, index), conversation.key, conversation.turns)
