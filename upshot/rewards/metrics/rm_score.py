"""What a sequence-classification reward model thinks of the conversation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from upshot.config.bounds import Count, Words
from upshot.core.conversation import Conversation, Message
from upshot.core.score import Reason, Score
from upshot.models.local import pick_device, pick_dtype
from upshot.models.rendering import Renderer
from upshot.models.tokens import SpecialTokens
from upshot.rewards.metric import Metric, metrics


@metrics.register("rm_score")
@dataclass(eq=False)
class RewardModelScore(Metric):
    """The reward model's logit for the whole conversation, squashed to 0…1 by default.

    The model is loaded at the first use. Conversations that wait at the same time are scored in one batch, in a
    thread; one batch at a time.
    """

    loads_model = True

    model: Words
    """Hugging Face name or folder of a sequence-classification model with one output."""
    batch_size: Count = 8
    max_length: Count = 4096
    """Tokens; a longer conversation loses its beginning."""
    squash: Literal["sigmoid", "none"] = "sigmoid"
    """sigmoid maps the logit to 0…1, none leaves it."""
    device: str = "auto"
    _loaded: tuple[Any, Any, Callable[[Sequence[Message]], list[int]]] | None = field(default=None, init=False)
    _waiting: list[tuple[list[Message], asyncio.Future[float]]] = field(default_factory=list, init=False)
    _worker: asyncio.Task[None] | None = field(default=None, init=False)

    async def score(self, conversation: Conversation) -> Score:
        """The reward model's score of everything said."""
        if conversation.last("assistant") is None:
            return Score.missing(Reason.NOTHING_SAID)
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((conversation.messages, done))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        value = await done
        if not math.isfinite(value):
            return Score.missing(Reason.NOT_A_SCORE, "rm_score: not finite")
        return Score(value)

    async def aclose(self) -> None:
        """Stop scoring and let go of the model."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for _, done in self._waiting:
            done.cancel()
        self._loaded = None

    async def _work(self) -> None:
        await asyncio.sleep(0)  # let conversations that are ready in this very moment join the batch
        while self._waiting:
            batch, self._waiting = self._waiting[: self.batch_size], self._waiting[self.batch_size :]
            batch = [(messages, done) for messages, done in batch if not done.done()]
            try:
                values = await asyncio.to_thread(self._rate, [messages for messages, _ in batch])
            except Exception as error:
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)
                continue
            for (_, done), value in zip(batch, values, strict=True):
                if not done.done():
                    done.set_result(value)

    def _rate(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        if not conversations:
            return []
        import torch

        tokenizer, model, encode = self._load()
        ids = [encode(messages)[-self.max_length :] for messages in conversations]
        inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(model.device)
        with torch.inference_mode():
            logits = model(**inputs).logits[:, 0].float()
        return [float(v) for v in (torch.sigmoid(logits) if self.squash == "sigmoid" else logits)]

    def _load(self) -> tuple[Any, Any, Callable[[Sequence[Message]], list[int]]]:
        if self._loaded is None:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            device = pick_device(self.device)
            kind = pick_dtype("auto", device)  # bfloat16 is slow or broken on many CPUs
            tokenizer = AutoTokenizer.from_pretrained(self.model)
            model = AutoModelForSequenceClassification.from_pretrained(self.model, dtype=kind).to(device).eval()
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            if model.config.pad_token_id is None:
                model.config.pad_token_id = tokenizer.pad_token_id
            self._loaded = (tokenizer, model, _encoder(tokenizer))
        return self._loaded


def _encoder(tokenizer: Any) -> Callable[[Sequence[Message]], list[int]]:
    """How a conversation becomes token ids. What is said in it stays text: no reply can open another turn."""
    if getattr(tokenizer, "chat_template", None):
        return Renderer(tokenizer).transcript_ids
    special = SpecialTokens(tokenizer)
    return lambda messages: special.encode("\n\n".join(f"{m.role}: {special.guard(m.content)}" for m in messages))
