"""A tiny Llama and a byte tokenizer, as the engine's tests have them."""

from tests.engine.conftest import llama, make_llama, tokenizer  # noqa: F401
