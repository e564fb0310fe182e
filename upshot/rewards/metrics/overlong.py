"""A soft punishment for replies that come near their token limit (DAPO's overlong shaping)."""

from __future__ import annotations

from upshot.config.bounds import Count
from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.rewards.metric import Metric, metrics


@metrics.register("overlong")
class Overlong(Metric):
    """0 up to `limit` − `buffer` tokens, then falling evenly to −1 at `limit`; of the longest policy turn.

    `limit` is the recipe's episode.max_tokens: a reply that was cut there gets the whole −1.
    """

    intrinsic = True

    def __init__(self, limit: Count, buffer: Count) -> None:
        if not 0 < buffer <= limit:
            raise UserError(f"metric 'overlong': buffer={buffer} should be between 1 and limit={limit}")
        self.limit, self.buffer = limit, buffer

    async def score(self, conversation: Conversation) -> Score:
        """The punishment, between −1 and 0."""
        longest = max((len(sample.ids) for sample in conversation.samples()), default=0)
        over = longest - (self.limit - self.buffer)
        return Score(-min(max(over / self.buffer, 0.0), 1.0))
