"""How many tokens the assistant spent."""

from __future__ import annotations

from typing import Any

from upshot.chat import Conversation
from upshot.rewards.metric import Metric, metrics
from upshot.score import Reason, Score


@metrics.register("token_amount")
class TokenAmount(Metric):
    """Assistant tokens of the reply and all that follows it, in single tokens of the policy's tokenizer.

    One unit everywhere: tokens, not thousands. A weight of −0.0001 is the λ = 1e-4 of the paper. The history that was
    given in the row is not counted: the reply under training did not spend it.
    """

    intrinsic = True

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    async def score(self, conversation: Conversation) -> Score:
        """The number of tokens; missing when a turn has no ids and there is no tokenizer to count with."""
        total = 0
        for turn in conversation.turns[len(conversation.row.messages) :]:
            if turn.sample is not None:
                total += len(turn.sample.ids)
            elif turn.message.role == "assistant":
                if self.tokenizer is not None:
                    total += len(self.tokenizer.encode(turn.message.content, add_special_tokens=False))
                elif "tokens" in turn.note:  # as the policy's own endpoint counted them
                    total += int(turn.note["tokens"])
                else:
                    return Score.missing(Reason.NOT_SCORED, "token_amount: no tokenizer")
        return Score(float(total))
