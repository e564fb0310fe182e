"""The calls of one program, stitched into paths: what the policy saw and said, by its exact ids.

A call whose messages begin with those of an earlier call and its reply goes on from there: the ids grow, and nothing is
rendered again. Any other call begins a path of its own, rendered as it stands: one whose context was edited, compacted
or cut, one with other tools, one of a second agent. What an assistant "said" in it without having been sampled there is
context, and never trained. Whoever echoes a reply in another form (smolagents writes calls as text) begins a new path,
too: what the policy saw is then what that program showed it.

The recipe's sampling holds, not the call's: only `max_tokens`, `stop`, `n`, tools and formats are the program's.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from upshot.core.conversation import Conversation, Message, Tools, Turn, derive_seed, text_of
from upshot.core.errors import UserError
from upshot.models.base import ModelCallError, Request
from upshot.rollout.episode import Policy
from upshot.serving.openai.conversations import ChatReply
from upshot.serving.openai.format import ChatRequest
from upshot.serving.openai.message import Dialect


@dataclass(frozen=True, slots=True)
class PlayedPath:
    """A path from an opening to a last reply."""

    conversation: Conversation
    start: int = 0
    """How many of its turns stand in an earlier path already."""


@dataclass(eq=False, slots=True)
class RecordedReply:
    """One reply, and what it was a reply to."""

    conversation: Conversation
    """Up to the reply itself."""
    before: RecordedReply | None
    order: tuple[int, int]
    """By which call it came, and which of its replies it is."""


class CallRecording:
    """Answers the calls of one conversation with the policy, and keeps what was said."""

    def __init__(self, conversation: Conversation, policy: Policy, dialect: Dialect, most: int) -> None:
        if policy.renderer is None:
            raise UserError("episode.agent needs a policy that reports token ids: a model in this process, or vLLM")
        self.conversation = conversation
        self.policy = policy
        self.dialect = dialect
        self.most = most
        """Calls that are answered."""
        self.replies: list[RecordedReply] = []
        self.calls = 0
        self._known: dict[bytes, RecordedReply] = {}
        """Replies by all that had been said up to and with them."""
        self._asked: Counter[bytes] = Counter()
        # A call comes by a connection; it is answered as what it is a part of: this step, by the weights that play it.
        self._context = contextvars.copy_context()

    async def answer(self, asked: ChatRequest) -> list[ChatReply]:
        """The replies to a call, recorded."""
        return await asyncio.get_running_loop().create_task(self._answer(asked), context=self._context)

    async def _answer(self, asked: ChatRequest) -> list[ChatReply]:
        if self.calls >= self.most:
            raise UserError(f"more than {self.most} calls in one episode (episode.agent.calls)")
        self.calls += 1
        call = self.calls
        request = asked.request(self.policy.sampling.max_tokens, self.dialect.thinks)
        history = digests(asked.messages, request.tools)
        before, turns = self._continue(history, request)
        self._asked[history[-1]] += 1
        again = self._asked[history[-1]]
        several = asked.parallel_tool_calls and not isinstance(asked.tool_choice, dict)

        async def one(index: int) -> ChatReply:
            seed = derive_seed(self.conversation.seed, "call", history[-1].hex(), again, index)
            path = Conversation(self.conversation.row, seed, f"{self.conversation.key}/call/{call}.{index}", turns)
            path.session["tools"] = request.tools
            reply = await self._reply(path, request, asked, several)
            recorded = RecordedReply(path, before, (call, index))
            self.replies.append(recorded)
            self._known[_digest(history[-1], reply.message)] = recorded
            return reply

        return list(await asyncio.gather(*(one(index) for index in range(request.n))))

    def _continue(self, history: Sequence[bytes], request: Request) -> tuple[RecordedReply | None, tuple[Turn, ...]]:
        """The reply that a call goes on from, if any, and the turns to speak after."""
        messages: list[Message] = list(request.prompt)  # type: ignore[arg-type]
        for count in range(len(messages) - 1, 0, -1):
            before = self._known.get(history[count])
            if before is not None:
                new = messages[count:]
                if any(message.role == "assistant" for message in new):
                    break  # the template decides how a history that is not ours is shown
                return before, (*before.conversation.turns, *map(Turn, new))
        return None, tuple(map(Turn, messages))

    async def _reply(self, path: Conversation, request: Request, asked: ChatRequest, several: bool) -> ChatReply:
        """The policy's next turn on a path, as it is sent."""
        recipe, call = self.policy.sampling, request.sampling
        # No tools but the call's, and no longer than it asks for.
        most, stop = min(call.max_tokens, recipe.max_tokens), (*recipe.stop, *call.stop)
        policy = replace(self.policy, tools=(), sampling=replace(recipe, max_tokens=most, stop=stop))
        formed = request.schema is not None
        if formed or asked.must_call:
            if not policy.model.abilities.schema:
                raise UserError("this policy enforces no format; drop response_format and use tool_choice auto")
            policy.form = {"schema": request.schema}
        if asked.must_call:
            form = self.dialect.reply_format(policy.context(path), bool(request.tools), formed, several)
            policy.form = {"lark": self.dialect.grammar(asked.demanded_tools(), form)}
        turn = await policy.reply(path)
        if turn is None:
            raise ModelCallError("too_long", f"the context of {policy.max_context} tokens is full (model.max_context)")
        assert turn.sample is not None
        form = self.dialect.reply_format(turn.sample.context, bool(request.tools), formed, several)
        message, finish = form.read(turn.sample.ids, policy.sampling.stop, turn.sample.finish)
        before = len(path.ids) - len(turn.sample.ids)
        return ChatReply(turn.sample.ids, turn.sample.logprobs, message, finish, before)

    def paths(self) -> list[PlayedPath]:
        """Every reply on one path at least: that of the last call first, then the others in the order of their last."""
        ordered = sorted(self.replies, key=lambda reply: reply.order)
        inner = {reply.before for reply in ordered}
        ends = [reply for reply in ordered if reply not in inner]
        placed: set[RecordedReply] = set()
        out = []
        for end in [*ends[-1:], *ends[:-1]]:
            at: RecordedReply | None = end
            while at is not None and at not in placed:
                placed.add(at)
                at = at.before
            out.append(PlayedPath(end.conversation, len(at.conversation.turns) if at is not None else 0))
        return out


def digests(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[bytes]:
    """A digest of the history after each message; the first, before any message, is of the tools alone."""
    out = [hashlib.blake2b(_plain(list(tools))).digest()]
    for message in messages:
        out.append(_digest(out[-1], message))
    return out


def _digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(before + _plain(_essence(message))).digest()


def _essence(message: Mapping[str, Any]) -> list[Any]:
    """What makes a message the same when a client sends it back: the form of its fields aside, and an assistant's
    blanks and thoughts, which clients drop."""
    content = text_of(message.get("content"), "messages")
    by_assistant = message.get("role") == "assistant"
    calls = [
        [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]
        for call in message.get("tool_calls") or ()
        if isinstance(function := call.get("function") or {}, Mapping)
    ]
    return [message.get("role"), content.strip() if by_assistant else content, calls, message.get("tool_call_id")]


def _arguments(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
