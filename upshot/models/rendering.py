"""Messages → token ids, so that a next turn only appends.

The first prompt is the chat template's own rendering. After a policy turn the template is applied to a stand-in
conversation that ends where the policy's turn ended, and only what comes after that point is taken: the end of the
policy's turn, the new messages, the next generation prompt. So earlier ids are never rendered again, even where the
template itself would rewrite history (thinking models drop old thoughts; Mistral moves the system prompt).

What this does not do: text that spells a special token inside a message is tokenised as that token, as chat templates
always do.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from upshot.core.conversation import Conversation, Message
from upshot.core.errors import UserError
from upshot.models.openai_format import TokenPieces

STAND_IN = "⟦upshot-reply⟧"
"""Content of the stand-in policy turn; found again in the rendered text to know where the turn ended."""

FURTHER = "A"
"""Stands for the words that may follow an open text."""


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """What the start-up check found out about a chat template."""

    appends: bool
    """Its own rendering of a longer conversation starts with that of the shorter one."""
    reason: str
    """How it rewrites history, where it does."""


class Renderer:
    """Renders conversations for one tokenizer."""

    def __init__(self, tokenizer: Any, template_options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_options = dict(template_options or {})
        self._single = TokenPieces(tokenizer)
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"tokenizer '{getattr(tokenizer, 'name_or_path', '?')}' has no chat template; "
                "use an instruct model or set model.chat_template"
            )

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The template's own rendering of an opening, up to where the policy starts to speak."""
        return self._apply(messages, tools, generation=True)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of `prompt_text`."""
        return self.encode(self.prompt_text(messages, tools))

    def delta_text(self, new: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """What follows a policy turn: its closing marks, the new messages, the next generation prompt."""
        base = [Message("user", "?"), Message("assistant", STAND_IN)]
        rendered = self._apply([*base, *new], tools, generation=True)
        _, found, after = rendered.rpartition(STAND_IN)
        if not found:
            raise UserError("this chat template drops the assistant's words; its turns cannot be appended")
        return after

    def context(self, conversation: Conversation, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids to put after `conversation.ids` so that the policy can speak next."""
        samples = list(conversation.samples())
        pending = conversation.unrendered
        if not samples:
            return self.prompt_ids(pending, tools)
        return self.encode(self._strip_end(self.delta_text(pending, tools), samples[-1].ids))

    def render_reply(self, text: str) -> list[int]:
        """Ids of an assistant turn that was not sampled (a demonstration), with its end-of-turn token."""
        return [*self.encode(text + self._closing[0]), self.end_id]

    @property
    def end_id(self) -> int:
        """The token the template closes a policy turn with."""
        return self._closing[1]

    @cached_property
    def _closing(self) -> tuple[str, int]:
        """How the template closes a turn: blanks, where it writes some first (Llama-2's ' </s>'), and the end token."""
        delta = self.delta_text([Message("user", "?")])
        bare = delta.lstrip()
        first = self.encode(bare)[0]
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        if bare != delta and first in special:
            return delta[: len(delta) - len(bare)], first
        return "", self.encode(delta)[0]

    @property
    def end_ids(self) -> set[int]:
        """Token ids that end a policy turn: the template's own and the tokenizer's end token."""
        eos = self.tokenizer.eos_token_id
        return {self.end_id} if eos is None else {self.end_id, eos}

    def demonstration(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], list[int]]:
        """Ids and loss mask of a whole dialogue, rendered turn by turn exactly as a rollout would be."""
        ids: list[int] = []
        mask: list[int] = []
        pending: list[Message] = []
        spoken = False
        for message in messages:
            if message.role != "assistant":
                pending.append(message)
                continue
            text = self.delta_text(pending, tools) if spoken else self.prompt_text(pending, tools)
            context = self.encode(self._strip_end(text, ids) if spoken else text)
            said = self.render_reply(self._render_calls(message, tools) if message.tool_calls else message.content)
            ids += context + said
            mask += [0] * len(context) + [1] * len(said)
            pending, spoken = [], True
        return ids, mask

    def _render_calls(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> str:
        """An assistant turn with tool calls in the template's own words, without what closes it."""
        asked = [Message("user", "?")]
        turn = self._apply([*asked, message], tools, generation=False)
        if turn == self._apply([*asked, replace(message, tool_calls=())], tools, generation=False):
            raise UserError("this chat template shows nothing of tool calls; set model.chat_template to one that does")
        plain = self._apply([*asked, Message("assistant", STAND_IN)], tools, generation=False)
        # Where the generation prompt says more than the template's turns do (opens a thought), their beginning counts.
        openings = [self._apply(asked, tools, generation=True), plain.partition(STAND_IN)[0]]
        before = next((text for text in openings if turn.startswith(text)), None)
        if before is None:
            raise UserError("this chat template opens a turn with tool calls unlike any other; they cannot be imitated")
        end = self.tokenizer.decode([self.end_id], skip_special_tokens=False)
        said, closed, after = turn[len(before) :].rpartition(end)
        return said if closed else after

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids without end-of-turn and other special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each id spells, special tokens included; the ids of one character spell it with their last."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self._single.raw(token), final=at == len(ids) - 1) for at, token in enumerate(ids)]

    def check(self) -> TemplateCheck:
        """Whether the template itself only appends, over a probe of three turns with a system prompt and a thought."""
        talk = [
            Message("user", "one"),
            Message("assistant", "<think>\nhm\n</think>\n\ntwo"),
            Message("user", "three"),
            Message("assistant", "four"),
            Message("user", "five"),
        ]
        for opening in ([Message("system", "zero")], []):
            try:
                self._apply([*opening, *talk], (), generation=True)
            except UserError:
                continue  # a template without system prompts refuses here; the next probe has none
            for cut in (1, 3):
                shorter = self._apply([*opening, *talk[:cut]], (), generation=True) + talk[cut].content
                longer = self._apply([*opening, *talk[: cut + 2]], (), generation=True)
                if not longer.startswith(shorter):
                    return TemplateCheck(False, f"it renders turn {cut} differently once the conversation goes on")
        return TemplateCheck(True, "")

    def _strip_end(self, delta: str, said: Sequence[int]) -> str:
        """The delta without the end-of-turn token when the policy has sampled it already."""
        if said and said[-1] == self.end_id:
            blanks, token = self._closing[0], self.tokenizer.decode([self.end_id], skip_special_tokens=False)
            if delta.startswith(blanks + token):
                return delta[len(blanks + token) :]
        return delta

    def _apply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], generation: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation,
                **self.template_options,
            )
        except Exception as error:  # jinja's TemplateError: imported lazily by transformers
            roles = " → ".join(message.role for message in messages)
            raise UserError(f"the chat template refuses the roles {roles}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_open(self, text: str) -> list[int]:
        """Token ids of a text that goes on: blanks at its end are cut as before further words, not as at an end.

        Tokenizers like GPT-2's make one token of the last two newlines of a text and two of them before a word.
        """
        if text[-1:].isspace():
            *ids, last = self.encode(text + FURTHER)
            if [last] == self.encode(FURTHER):
                return ids
        return self.encode(text)


def _for_template(message: Message) -> dict[str, Any]:
    """The message as templates take it: a call's arguments as the object that its JSON text says."""
    out = message.to_dict()
    for call in out.get("tool_calls", ()):
        function = dict(call.get("function") or {})
        try:
            parsed = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError):
            continue
        if isinstance(parsed, dict):
            call["function"] = {**function, "arguments": parsed}
    return out
