"""Messages → token ids, so that a next turn only appends.

The first prompt is the chat template's own rendering. After a policy turn, the template is applied to a stand-in
conversation that ends where the policy's turn ended, and only the text after that point is used: the end of the
policy's turn, the new messages and the next generation prompt. So earlier ids are never rendered again, even if the
template itself would rewrite history (thinking models drop old thoughts; Mistral moves the system prompt).

The content of a message stays text: if it spells a special token, it is encoded as ordinary text (tokens.py).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from upshot.config.recipe import Recipe
from upshot.core.conversation import Conversation, Message, Tools
from upshot.core.errors import UserError
from upshot.core.thought import MARKERS
from upshot.models.tokens import GUARD, RECENT, SpecialTokens, TokenPieces, decoder_of
from upshot.models.turn_marks import TurnMarks, find_turn_marks

STAND_IN = f"{GUARD}reply{GUARD}"
"""Content of the stand-in policy turn; found again in the rendered text to know where the turn ended. No message can
say it: a guard in what is said is taken out."""

PROBE = f"{GUARD}probe{GUARD}"

STOOD_FOR = (Message("user", "?"), Message("assistant", STAND_IN))
"""The stand-in conversation."""

END_OF_TURN = "end_of_turn"
"""Where a tokenizer keeps the end token that a recipe named."""

FURTHER = "A"
"""Stands for the words that may follow a text."""


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """The result of the start-up check of a chat template."""

    appends: bool
    """Its own rendering of a longer conversation starts with that of the shorter one."""
    reason: str
    """How it rewrites history, if it does."""
    words: tuple[str, ...] = ()
    """Ordinary text that marks turns; if a message contains it, a space is put inside."""


def policy_renderer(tokenizer: Any, recipe: Recipe) -> Renderer:
    """The renderer of a recipe's policy."""
    return Renderer(tokenizer, recipe.model.template_options, recipe.episode.think or ())


def set_end_token(tokenizer: Any, token: str) -> None:
    """Name the token that ends an assistant's turn; it is saved with the tokenizer, like the chat template."""
    if token not in tokenizer.get_vocab():
        raise UserError(f"model.end_token '{token}' is not in the vocabulary of the tokenizer")
    tokenizer.init_kwargs[END_OF_TURN] = token


class Renderer:
    """Renders conversations for one tokenizer."""

    def __init__(
        self, tokenizer: Any, template_options: Mapping[str, Any] | None = None, think: Sequence[str] = MARKERS
    ) -> None:
        """`think`: the markers that replies put around thoughts."""
        self.tokenizer = tokenizer
        self.template_options = dict(template_options or {})
        self.think = think
        self._single = TokenPieces(tokenizer)
        self.decode_ids = decoder_of(tokenizer)
        self._recent = lru_cache(RECENT)(self._render)
        self._shown: set[str] = set()
        """Roles whose messages the template is known to show."""
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"tokenizer '{getattr(tokenizer, 'name_or_path', '?')}' has no chat template; "
                "use an instruct model or set model.chat_template"
            )

    def prompt_text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The template's own rendering of an opening, up to where the policy starts to speak.

        Special tokens that a message spells are guarded in it, as `encode` expects.
        """
        return self._apply(messages, tools, generation=True)

    def transcript_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the template's own rendering of a whole conversation, without a generation prompt."""
        return self.encode(self._apply(messages, (), generation=False))

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Token ids of `prompt_text`."""
        return self.encode(self.prompt_text(messages, tools))

    def delta_text(self, new: Sequence[Message], tools: Tools = ()) -> str:
        """What follows a policy turn: its closing marks, the new messages, the next generation prompt."""
        rendered = self._apply(new, tools, generation=True, before=STOOD_FOR)
        _, stand_in, after = rendered.rpartition(STAND_IN)
        if not stand_in:
            raise UserError("this chat template leaves out the assistant's words, so its turns cannot be appended")
        for message in new:
            self._check_shown(message)
        return after

    def _check_shown(self, message: Message) -> None:
        """Refuse a message whose role the template leaves out (checked once per role): the policy would not see it."""
        if message.role in self._shown:
            return
        probe = replace(message, content=PROBE)
        if PROBE not in self._fill([_for_template(each) for each in (*STOOD_FOR, probe)], (), generation=True):
            raise UserError(
                f"this chat template leaves out '{message.role}' messages that follow a reply; "
                "set model.chat_template to one that shows them"
            )
        self._shown.add(message.role)

    def context(self, conversation: Conversation, tools: Tools = ()) -> list[int]:
        """Ids to put after `conversation.ids` so that the policy can speak next."""
        samples = list(conversation.samples())
        pending = conversation.unrendered
        if not samples:
            return self.encode(self._apply(pending, tools, generation=True))
        return self.encode(self._strip_end(self.delta_text(pending, tools), samples[-1].ids))

    def render_reply(self, text: str) -> list[int]:
        """Ids of an assistant turn that was not sampled (a demonstration), with its end-of-turn token."""
        return self._close(self.guard(self._follow_prompt(text), "assistant"))

    def _follow_prompt(self, text: str) -> str:
        """What an assistant says, as it follows the prompt: with the blanks that the template writes before it.

        If the prompt has opened a thought, the text's own thought continues it; without one it is closed first.
        """
        lead, opened = self._lead
        if opened and text.lstrip().startswith(self.think[0]):
            text = text.lstrip().removeprefix(self.think[0]).lstrip("\n")
        return text if text.startswith(lead) or (opened and self.think[1] in text) else lead + text

    @cached_property
    def _lead(self) -> tuple[str, bool]:
        """What the template writes between the prompt and an assistant's words: blanks (Llama-2's '[/INST] ') or, where
        the prompt has opened a thought (Qwen3.5, DeepSeek-R1), what closes it. And whether it has."""
        prompt = self._apply([], (), generation=True, before=STOOD_FOR[:-1])
        whole = self._apply([], (), generation=False, before=STOOD_FOR)
        lead = whole[len(prompt) :].partition(STAND_IN)[0] if whole.startswith(prompt) else ""
        if self.think and prompt.rstrip().endswith(self.think[0]):
            return lead if self.think[1] in lead else f"{self.think[1]}\n\n", True
        return lead if lead.isspace() else "", False

    def _close(self, guarded: str) -> list[int]:
        return [*self.encode(guarded + self._closing[0]), self.end_id]

    @property
    def end_id(self) -> int:
        """The token the template closes a policy turn with."""
        return self._closing[1]

    @cached_property
    def _closing(self) -> tuple[str, int]:
        """How the template closes a turn: blanks, where it writes some first (Llama-2's ' </s>'), and the end token."""
        delta = self.delta_text([Message("user", "?")])
        bare = delta.lstrip()
        first = next(iter(self.encode(bare)), None)
        blanks = delta[: len(delta) - len(bare)]
        if end_token := getattr(self.tokenizer, "init_kwargs", {}).get(END_OF_TURN):
            return blanks if bare.startswith(end_token) else "", self.tokenizer.convert_tokens_to_ids(end_token)
        marks = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        if first is not None and first in marks - {self.tokenizer.unk_token_id}:
            return blanks, first
        raise UserError(
            f"the chat template ends an assistant turn with {delta[:20]!r} instead of an end token, so replies "
            f"would be cut there; set model.end_token (perhaps '{self.tokenizer.eos_token}'; in Python: "
            "upshot.models.rendering.set_end_token), or model.chat_template to a template that writes one"
        )

    @property
    def end_ids(self) -> set[int]:
        """Token ids that end a policy turn: the template's own and the tokenizer's end token."""
        eos = self.tokenizer.eos_token_id
        return {self.end_id} if eos is None else {self.end_id, eos}

    def demonstration(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[list[int], list[int]]:
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
            if message.tool_calls:
                words = self._render_calls(message, tools)
                reply = self._close(self._follow_prompt(words) if self._lead[1] else words)
            else:
                reply = self.render_reply(message.content)
            ids += context + reply
            mask += [0] * len(context) + [1] * len(reply)
            pending, spoken = [], True
        return ids, mask

    def _render_calls(self, message: Message, tools: Tools) -> str:
        """An assistant turn with tool calls in the template's own words, without what closes it."""
        question = [Message("user", "?")]
        turn = self._apply([*question, message], tools, generation=False)
        plain = self._apply((), tools, generation=False, before=STOOD_FOR)
        if turn == plain.replace(STAND_IN, self.guard(message.content, "assistant")):
            raise UserError("this chat template leaves out tool calls; set model.chat_template to one that shows them")
        # Where the generation prompt says more than the template's turns do (opens a thought), their beginning counts.
        openings = [self._apply(question, tools, generation=True), plain.partition(STAND_IN)[0]]
        before = next((text for text in openings if turn.startswith(text)), None)
        if before is None:
            raise UserError("this chat template opens turns with tool calls differently; they cannot be imitated")
        end = self.tokenizer.decode([self.end_id], skip_special_tokens=False)
        words, closed, after = turn[len(before) :].rpartition(end)
        return words if closed else after

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids without end-of-turn and other special tokens."""
        return self.decode_ids(list(ids), skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each id spells, special tokens included; the ids of one character spell it with their last."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = len(ids) - 1
        return [decoder.decode(self._single.raw(token), final=place == last) for place, token in enumerate(ids)]

    def check(self) -> TemplateCheck:
        """Whether the template itself only appends, over a probe of three turns with a system prompt and a thought."""
        texts = ("one", "<think>\nhm\n</think>\n\ntwo", "three", "four", "five")
        talk = [Message("assistant" if turn % 2 else "user", text) for turn, text in enumerate(texts)]
        words = tuple(sorted(self._marks.words))
        for opening in ([Message("system", "zero")], []):
            try:
                self._apply([*opening, *talk], (), generation=True)
            except UserError:
                continue  # a template without system prompts refuses here; the next probe has none
            for cut in (1, 3):
                shorter = self._apply([*opening, *talk[:cut]], (), generation=True) + talk[cut].content
                if not self._apply([*opening, *talk[: cut + 2]], (), generation=True).startswith(shorter):
                    why = f"it renders turn {cut} differently once the conversation continues"
                    return TemplateCheck(False, why, words)
        return TemplateCheck(True, "", words)

    def _strip_end(self, delta: str, spoken: Sequence[int]) -> str:
        """The delta without the end-of-turn token when the policy has sampled it already."""
        if spoken and spoken[-1] == self.end_id:
            blanks, token = self._closing[0], self.tokenizer.decode([self.end_id], skip_special_tokens=False)
            if delta.startswith(blanks + token):
                return delta[len(blanks + token) :]
        return delta

    def _apply(
        self, messages: Sequence[Message], tools: Tools, generation: bool, before: Sequence[Message] = ()
    ) -> str:
        """The template's rendering of messages whose special tokens are guarded; `before`: messages of our own."""
        if tools or any(message.tool_calls for message in messages):  # mappings, by which nothing can be found again
            return self._render(messages, tools, generation, before)
        return self._recent(tuple(messages), (), generation, tuple(before))

    def _render(self, messages: Sequence[Message], tools: Tools, generation: bool, before: Sequence[Message]) -> str:
        guarded = [self._special.guard_all(_for_template(each), self._keep(each.role)) for each in messages]
        shown = [*map(_for_template, before), *guarded]
        return self._fill(shown, self._special.guard_all(list(tools), self._keep("system")), generation)

    def _fill(self, messages: list[dict[str, Any]], tools: Sequence[Any], generation: bool) -> str:
        try:
            fill, options = self.tokenizer.apply_chat_template, {"tokenize": False, "add_generation_prompt": generation}
            return fill(messages, tools=list(tools) or None, **options, **self.template_options)
        except Exception as error:  # jinja's TemplateError: imported lazily by transformers
            roles = " → ".join(message["role"] for message in messages)
            raise UserError(f"the chat template refuses the roles {roles}: {error}") from error

    @cached_property
    def _marks(self) -> TurnMarks:
        return find_turn_marks(self.tokenizer, lambda messages: self._fill(messages, (), True), self.think)

    @cached_property
    def _special(self) -> SpecialTokens:
        marks = self._marks
        return SpecialTokens(self.tokenizer, marks.tokens | marks.of_tools, marks.words)

    def guard(self, text: str, role: str = "user") -> str:
        """The content of a message, ready to be rendered or encoded: special tokens in it stay text.

        The policy may mark its thoughts, and all but tools may mention the tokens around calls and results.
        """
        return self._special.guard(text, self._keep(role))

    def _keep(self, role: str) -> Collection[str]:
        """Tokens that a role may say."""
        mentioned = () if role == "tool" else self._marks.of_tools
        return {*mentioned, *self.think} if role == "assistant" else mentioned

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text, nothing added; what is guarded in it is ordinary text."""
        return self._special.encode(text)

    def encode_words(self, words: str) -> list[int]:
        """Token ids of a text outside of any template: special tokens in it are ordinary text."""
        return self.encode(self.guard(words))

    def encode_open(self, text: str) -> list[int]:
        """Token ids of a text that will be continued: trailing blanks are tokenised as before further words.

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
