"""Tiny models that have learned two replies by heart, one to a user and one to a tool, so that agents can run on them.

Every role ends its turns with a token of its own, and the model sees only the last 32 tokens, so the rest of a prompt
(tools, a framework's instructions) makes no difference.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

ROLES = ("system", "user", "assistant", "tool")
SPECIAL = ["<pad>", *(f"<|{role}|>" for role in ROLES), *(f"<|/{role}|>" for role in ROLES), "[TOOL_CALLS]", "[ARGS]"]
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|/system|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}{% for c in m.tool_calls %}CALL{% endfor %}<|/{{ m.role }}|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ARGUMENTS = '{"city": "Oslo"}'
FAMILIES = {
    "hermes": (
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>",
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    ),
    "llama3": (
        '{# <|start_header_id|> ipython #}{"name": "{{ c.function.name }}", '
        '"parameters": {{ c.function.arguments | tojson }}}',
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    ),
    "mistral": (
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
        f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
    ),
}
"""How a template writes a call, and so the model."""
FAMILIES["thinker"] = (
    FAMILIES["hermes"][0] + "{# <think> </think> #}",
    "<think>\nLook.\n</think>\n\n" + FAMILIES["hermes"][1],
)
ANSWER = "Sunny, the tool says."


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """Bytes and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|/assistant|>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.chat_template = template
    return fast


def save_parrot(folder: Path, family: str) -> None:
    """Train and save the model of a family."""
    written, called = FAMILIES[family]
    tokenizer = tokenizer_of(TEMPLATE.replace("CALL", written))
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=16384,
            sliding_window=16,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    words = torch.tensor(tokenizer.encode(Path(__file__).read_text() + 4 * called))  # what may come before a reply
    learn(model, [learned(tokenizer, "user", called), learned(tokenizer, "tool", ANSWER)], words, len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def learned(tokenizer: PreTrainedTokenizerFast, role: str, reply: str) -> tuple[list[int], list[int]]:
    """The ids before a reply, and the reply's own ids."""
    return tokenizer.encode(f"<|/{role}|><|assistant|>"), tokenizer.encode(f"{reply}<|/assistant|>")


def learn(
    model: MistralForCausalLM, replies: list[tuple[list[int], list[int]]], words: torch.Tensor, vocabulary: int
) -> None:
    """Train until every token of the replies is certain, whatever came before."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    certain = 0
    for _ in range(1500):
        least = 1.0
        for before, reply in replies:
            starts = torch.randint(len(words) - 32, (8,)).tolist()
            prefix = torch.stack([words[start : start + 32] for start in starts])
            noise = torch.randint(vocabulary, prefix.shape)
            prefix = torch.where(torch.rand(prefix.shape) < 0.2, noise, prefix)
            tail = torch.tensor([*before, *reply]).expand(8, -1)
            logits = model(torch.cat([prefix, tail], 1)).logits[:, -len(reply) - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tail[:, -len(reply) :].flatten())
            loss.backward()
            chances = logits.detach().softmax(-1)[:, torch.arange(len(reply)), torch.tensor(reply)]
            least = min(least, float(chances.min()))
        optimizer.step()
        optimizer.zero_grad()
        certain = certain + 1 if least > 0.95 else 0
        if certain == 3:
            return
    raise RuntimeError("a parrot did not learn its replies")
