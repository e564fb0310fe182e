"""BLEU of a text against the reference, on words."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from upshot.core.conversation import Conversation
from upshot.core.score import Reason, Score
from upshot.rewards.metric import Metric, metrics
from upshot.tasks.participants.templates import as_text


@metrics.register("bleu")
class Bleu(Metric):
    """Sentence BLEU (sacrebleu, 13a words, effective order) of the last assistant message, from 0 to 1.

    `document->bleu` scores the document instead. The paper's tables print it times 100.
    """

    async def score(self, conversation: Conversation) -> Score:
        """The score; missing without a reference or without any assistant message."""
        reference = conversation.row.reference
        several = list(reference) if isinstance(reference, list | tuple) else [reference]
        references = [text for item in several if (text := as_text(item).strip())]
        last = conversation.last("assistant")
        if not references:
            return Score.missing(Reason.BAD_ROW, "bleu: no reference")
        if last is None:
            return Score.missing(Reason.NOTHING_SAID)
        # A long document costs milliseconds of CPU: off the event loop, where other conversations wait.
        return Score(await asyncio.to_thread(word_bleu, last.content, references))


metrics.register_foreign("bleu_score", "bleu", "on words, from 0 to 1; the verl recipe's counts characters")


def word_bleu(text: str, references: Sequence[str]) -> float:
    """BLEU on words of a text against its references, from 0 to 1."""
    from sacrebleu.metrics.bleu import BLEU

    # sacrebleu takes strings and cuts them into words itself; n-grams of characters come from feeding NLTK strings.
    return float(BLEU(effective_order=True).sentence_score(text, list(references)).score) / 100.0
