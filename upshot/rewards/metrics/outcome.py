"""Whether a conversation ended well for the user, by a model that was fitted to logs with outcomes, or any other."""

from __future__ import annotations

from collections.abc import Mapping

from upshot.config.bounds import Count, Words
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, derive_seed
from upshot.core.score import Reason, Score
from upshot.models.base import Model, Request
from upshot.rewards.metric import Metric, metrics
from upshot.tasks.participants.base import find_model
from upshot.tasks.users.transcripts import BAD, GOOD, ask_outcome


@metrics.register("outcome")
class LoggedOutcome(Metric):
    """The share of a model's valid answers that say the conversation ended well."""

    def __init__(
        self,
        model: Words = "user",
        models: Mapping[str, Model] | None = None,
        samples: Count = 4,
        max_tokens: Count = 4,
    ) -> None:
        """model: a name among the recipe's `models`. samples: how often it is asked. max_tokens: of an answer."""
        self.model = find_model("the metric 'outcome'", model, models or {})
        self.samples = samples
        self.sampling = Sampling(max_tokens=max_tokens, temperature=1.0)

    async def score(self, conversation: Conversation) -> Score:
        """A number from 0 to 1; missing where no answer is good or bad."""
        shown = ask_outcome(conversation.row.goal, conversation.messages)
        seed = derive_seed(conversation.seed, "outcome", len(conversation.turns))
        request = Request(shown, self.sampling, self.samples, role="judge").with_seed(seed)
        answers = [completion.text.strip().lower() for completion in await self.model.generate(request)]
        votes = [text.startswith(GOOD) for text in answers if text.startswith((GOOD, BAD))]
        if not votes:
            return Score.missing(Reason.BAD_ANSWER, f"outcome: neither good nor bad, but {answers[0][:40]!r}")
        return Score(sum(votes) / len(votes), detail={"answers": len(votes)})
