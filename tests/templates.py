"""Chat templates of seven model families and some awkward ones, written after their published behaviour.

Each has the family's markers, its treatment of system prompts, white space, tools and old thoughts, and its refusals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2 and Qwen2.5: all messages have the same form. (SmolLM2 also adds a default system prompt, as `CHATML_DEFAULT`
does.)"""

CHATML_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Llama 3: begins with the bos token, trims contents, closes turns with eot."""

QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "{% set said = parts[-1].lstrip('\\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen3: an assistant turn keeps its thought only until the next user message."""

MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set talk = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set talk = messages %}{% endif %}"
    "{{ bos_token }}{% for m in talk %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
"""Mistral 7B v0.3: the system prompt is put before the last user message, so a longer conversation moves it."""

GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Gemma: no system role, the assistant is called model, contents are trimmed."""

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
"""Llama 2: a space before the end token."""

LLAMA3_TOOLS = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set talk = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set talk = messages %}{% endif %}"
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}"
    "{{ system }}<|eot_id|>"
    "{% if tools %}<|start_header_id|>user<|end_header_id|>\n\n{% for t in tools %}{{ t | tojson(indent=4) }}\n\n"
    "{% endfor %}{{ talk[0].content | trim }}<|eot_id|>{% set talk = talk[1:] %}{% endif %}"
    "{% for m in talk %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('only single tool calls') }}{% endif %}{% set call = m.tool_calls[0].function %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Llama 3.1: tools before the first user message, results as JSON text, always a system prompt."""

QWEN3_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "<tools>\n{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}</tools>\n"
    "Answer with <tool_call>\n{...}\n</tool_call><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3 with tools: consecutive results share a user turn; a last reply gets an empty thought."""

MISTRAL_TOOLS = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set talk = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set talk = messages %}{% endif %}"
    "{% set users = talk | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}{% for m in talk %}"
    "{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Mistral Nemo: tools and system prompt before the last user message, call ids of nine characters."""

PHI3 = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
"""Phi 3: a marker for each role; messages of any other role are silently dropped."""

PLAIN = (
    "{% for m in messages %}{{ 'Assistant' if m.role == 'assistant' else 'User' }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""A template without any special token: nothing but the next line ends a turn."""

FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
"""A template that drops the assistant's words: nothing can be appended to them."""

FAMILIES: dict[str, tuple[str, str, str | None]] = {
    "chatml": (CHATML, "<|im_end|>", None),
    "chatml-default-system": (CHATML_DEFAULT, "<|im_end|>", None),
    "llama3": (LLAMA3, "<|eot_id|>", "<|begin_of_text|>"),
    "qwen3": (QWEN3, "<|im_end|>", None),
    "llama2": (LLAMA2, "</s>", "<s>"),
    "mistral": (MISTRAL, "</s>", "<s>"),
    "gemma": (GEMMA, "<end_of_turn>", "<bos>"),
    "llama3-tools": (LLAMA3_TOOLS, "<|eot_id|>", "<|begin_of_text|>"),
    "qwen3-tools": (QWEN3_TOOLS, "<|im_end|>", None),
    "mistral-tools": (MISTRAL_TOOLS, "</s>", "<s>"),
    "phi3": (PHI3, "<|end|>", None),
}
"""Name → template, end-of-turn token, bos token."""

SPECIALS = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>",
    "<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>", "<end_of_turn>", "<pad>",
    "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
]  # fmt: skip


def byte_tokenizer(family: str, merges: Sequence[tuple[str, str]] = (), special: Sequence[str] = SPECIALS) -> Any:
    """A byte-level tokenizer with a family's template and special tokens; without merges, a text has only one
    tokenization."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = [*alphabet, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    template, end, bos = FAMILIES.get(family, (FORGETFUL, "<|im_end|>", None))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template,
        eos_token=end,
        bos_token=bos,
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
