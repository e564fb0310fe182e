"""How many tokens the assistant spent."""

from __future__ import annotations

from typing import Any

from upshot.core.conversation import Conversation
from upshot.core.score import Reason, Score
from upshot.rewards.metric import Metric, metrics


@metrics.register("token_amount")
class TokenAmount(Metric):
    """Assistant tokens of the reply and all that follows it, in single tokens of the policy's tokenizer.

    One number by every route (training, an endpoint, a file): what the tokenizer makes of thought and answer, without
    the template's own tokens. Only where no tokenizer is at hand do the sampled ids count, or the endpoint's word. One
    unit everywhere: tokens, not thousands. A weight of −0.0001 is the λ = 1e-4 of the paper. The history that was given
    in the row is not counted: the reply under training did not spend it.
    """

    intrinsic = True

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    async def score(self, conversation: Conversation) -> Score:
        """The number of tokens; missing when a turn has no ids and there is no tokenizer to count with."""
        tokens = 0
        for turn in conversation.turns[len(conversation.row.messages) :]:
            if turn.message.role != "assistant":
                continue
            sampled = len(turn.sample.ids) if turn.sample is not None else turn.note.get("tokens")
            if self.tokenizer:
                for text in filter(None, (turn.message.content, str(turn.note.get("thought") or ""))):
                    tokens += len(self.tokenizer.encode(text, add_special_tokens=False))
            elif sampled is not None:
                tokens += int(sampled)
            else:
                return Score.missing(Reason.NOT_SCORED, "token_amount: no tokenizer")
        return Score(float(tokens))
