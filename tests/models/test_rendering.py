"""Rendering: a new turn only appends, whatever the chat template does with the history."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.templates import CHATML, FAMILIES, PLAIN, byte_tokenizer
from upshot.config.recipe import PolicyConfig
from upshot.core.conversation import Conversation, Message, Row, Sample
from upshot.core.errors import UserError
from upshot.models.local import load_tokenizer
from upshot.models.rendering import Renderer, set_end_token
from upshot.tasks.slots import SlotsTask
from upshot.training.setup import find_tokenizer

RENDERERS = {family: Renderer(byte_tokenizer(family)) for family in FAMILIES}
APPENDING = [family for family in FAMILIES if not family.startswith(("qwen3", "llama2", "mistral"))]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
words = st.text(st.characters(codec="utf-8", exclude_characters="<>[]|"), min_size=1, max_size=20).filter(
    lambda text: text.strip() == text and text
)
turns = st.lists(st.tuples(words, words, st.booleans()), min_size=1, max_size=4)


def play(renderer: Renderer, opening: list[Message], talk: list[tuple[str, str, bool]]) -> Conversation:
    """A conversation whose policy turns are "sampled" as given; some are cut before the end-of-turn token."""
    conversation = Conversation(Row("r", tuple(opening)))
    for user, reply, ended in talk:
        conversation.say(Message("user", user))
        context = renderer.context(conversation)
        ids = renderer.render_reply(reply) if ended else renderer.render_reply(reply)[:-1]
        sample = Sample(tuple(context), tuple(ids), (0.0,) * len(ids), "stop" if ended else "length")
        conversation.say(Message("assistant", reply), sample)
    return conversation


@pytest.mark.parametrize("family", FAMILIES)
@given(talk=turns)
@settings(max_examples=40, deadline=None)
def test_earlier_ids_are_a_prefix_of_later_ones(family: str, talk: list[tuple[str, str, bool]]) -> None:
    renderer = RENDERERS[family]
    whole = play(renderer, [], talk)
    for cut in range(1, len(talk)):
        shorter = play(renderer, [], talk[:cut])
        assert whole.ids[: len(shorter.ids)] == shorter.ids
    assert len(whole.ids) == len(whole.mask) == len(whole.logprobs)
    sampled = [i for i, bit in zip(whole.ids, whole.mask, strict=True) if bit]
    assert sampled == [i for sample in whole.samples() for i in sample.ids]


@pytest.mark.parametrize("family", APPENDING)
@given(talk=turns)
@settings(max_examples=40, deadline=None)
def test_appended_turns_equal_what_the_template_renders(family: str, talk: list[tuple[str, str, bool]]) -> None:
    renderer = RENDERERS[family]
    ended = [(user, reply, True) for user, reply, _ in talk]
    conversation = play(renderer, [], ended)
    conversation.say(Message("user", "and now?"))
    ours = renderer.tokenizer.decode(conversation.ids + renderer.context(conversation), skip_special_tokens=False)
    assert ours == renderer.prompt_text(conversation.messages)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_cut_at_the_limit_is_closed_before_the_next_message(family: str) -> None:
    renderer = RENDERERS[family]
    conversation = play(renderer, [], [("hi", "half a thou", False)])
    conversation.say(Message("user", "go on"))
    context = renderer.context(conversation)
    end = context.index(renderer.end_id)
    assert renderer.tokenizer.decode(context[:end]).strip() == ""
    ended = play(renderer, [], [("hi", "half a thou", True)])
    ended.say(Message("user", "go on"))
    assert context[end + 1 :] == renderer.context(ended)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_turn_token_is_that_of_the_family(family: str) -> None:
    renderer = RENDERERS[family]
    assert renderer.tokenizer.convert_ids_to_tokens(renderer.end_id) == FAMILIES[family][1]
    assert renderer.end_id in renderer.end_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_the_start_up_check_finds_templates_that_rewrite_history(family: str) -> None:
    assert RENDERERS[family].check().appends == (family in APPENDING)


def test_old_thoughts_stay_in_the_ids_although_the_template_drops_them() -> None:
    renderer = RENDERERS["qwen3"]
    conversation = play(renderer, [], [("hi", "<think>\nhm\n</think>\n\nhello", True), ("more", "yes", True)])
    ours = renderer.tokenizer.decode(conversation.ids, skip_special_tokens=False)
    assert "hm" in ours
    assert "hm" not in renderer.prompt_text(conversation.messages[:3])


def test_the_system_prompt_is_rendered_once_and_stays_in_front() -> None:
    renderer = RENDERERS["mistral"]
    conversation = play(renderer, [Message("system", "be brief")], [("one", "two", True), ("three", "four", True)])
    ours = renderer.tokenizer.decode(conversation.ids, skip_special_tokens=False)
    assert ours == "<s>[INST] be brief\n\none[/INST] two</s>[INST] three[/INST] four</s>"


def test_a_demonstration_is_rendered_as_a_rollout_of_the_same_words() -> None:
    renderer = RENDERERS["llama3"]
    played = play(renderer, [], [("one", "two", True), ("three", "four", True)])
    ids, mask = renderer.demonstration(played.messages)
    assert (ids, mask) == (played.ids, played.mask)


def test_a_demonstration_opens_and_closes_its_turns_as_the_template_does() -> None:
    renderer = RENDERERS["llama2"]
    ids, _ = renderer.demonstration(
        [Message("user", "one"), Message("assistant", "two"), Message("user", "three"), Message("assistant", "four")]
    )
    text = renderer.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<s>[INST] one [/INST] two </s><s>[INST] three [/INST] four </s>"


@pytest.mark.parametrize("closing", ["<think>\n\n</think>\n\n", ""], ids=["as Qwen3.5", "as DeepSeek-R1"])
@pytest.mark.parametrize(
    ("reply", "rendered"),
    [
        ("It is 20.", "</think>\n\nIt is 20."),
        ("hm\n</think>\n\nIt is 20.", "hm\n</think>\n\nIt is 20."),
        ("<think>\nhm\n</think>\n\nIt is 20.", "hm\n</think>\n\nIt is 20."),
    ],
)
def test_a_thought_that_the_prompt_opens_is_closed_before_the_demonstrated_reply(
    reply: str, rendered: str, closing: str
) -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = CHATML.replace(
        "{{ m.content }}", f"{{% if m.role == 'assistant' %}}{closing}{{% endif %}}{{{{ m.content }}}}"
    ).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    ids, mask = Renderer(tokenizer).demonstration([Message("user", "?"), Message("assistant", reply)])
    text = tokenizer.decode([i for i, trained in zip(ids, mask, strict=True) if trained], skip_special_tokens=False)
    assert text.lstrip("\n") == rendered + "<|im_end|>"


def test_a_template_that_drops_the_assistants_words_is_refused() -> None:
    renderer = Renderer(byte_tokenizer("forgetful"))
    with pytest.raises(UserError, match="leaves out the assistant's words"):
        renderer.delta_text([Message("user", "next")])


def test_roles_the_template_refuses_are_named() -> None:
    with pytest.raises(UserError, match=r"system → user.*System role not supported"):
        RENDERERS["gemma"].prompt_text([Message("system", "s"), Message("user", "u")])


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        Renderer(tokenizer)


def test_a_template_without_an_end_token_is_refused_until_one_is_named() -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = PLAIN
    with pytest.raises(UserError, match=r"ends an assistant turn with '\\nUser.* set model.end_token"):
        _ = Renderer(tokenizer).end_ids
    with pytest.raises(UserError, match=r"model.end_token '<eot>' is not in the vocabulary"):
        set_end_token(tokenizer, "<eot>")
    set_end_token(tokenizer, "</s>")
    renderer = Renderer(tokenizer)
    assert tokenizer.convert_ids_to_tokens(renderer.end_id) == "</s>"
    ids, _ = renderer.demonstration([Message("user", "a"), Message("assistant", "b")] * 2)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "User: a\nAssistant: b</s>\nUser: a\nAssistant: b</s>"


def test_a_named_end_token_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = PLAIN
    set_end_token(tokenizer, "</s>")
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.convert_ids_to_tokens(Renderer(loaded).end_id) == "</s>"


def test_a_recipe_names_the_end_token() -> None:
    task = SlotsTask(rows_per_split=8)
    config = PolicyConfig(chat_template=PLAIN, end_token="<|end|>")
    tokenizer = find_tokenizer(config, task)
    assert Renderer(tokenizer).end_ids == {tokenizer.convert_tokens_to_ids("<|end|>")}
    with pytest.raises(UserError, match=r"set model.end_token \(perhaps '<\|end\|>'"):
        _ = Renderer(find_tokenizer(PolicyConfig(chat_template=PLAIN), task)).end_ids


def test_messages_that_the_template_leaves_out_are_refused() -> None:
    renderer = RENDERERS["phi3"]
    conversation = play(renderer, [], [("one", "two", True)])
    conversation.say(Message("tool", "42", tool_call_id="call00001"))
    with pytest.raises(UserError, match="leaves out 'tool' messages"):
        renderer.context(conversation)


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("llama3-tools", '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'),
        ("qwen3-tools", "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"),
        ("mistral-tools", '[TOOL_RESULTS]{"content": 42, "call_id": "call00001"}[/TOOL_RESULTS]'),
    ],
)
def test_a_tool_result_is_appended_in_the_vendors_own_form(family: str, told: str) -> None:
    renderer = RENDERERS[family]
    conversation = play(renderer, [], [("one", "two", True)])
    conversation.say(Message("tool", "42", tool_call_id="call00001", name="add"))
    assert renderer.tokenizer.decode(renderer.context(conversation, TOOLS), skip_special_tokens=False).startswith(told)
