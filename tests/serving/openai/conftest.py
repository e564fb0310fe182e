"""A tiny Llama and a byte tokenizer, shared with the engine's tests."""

from tests.engine.conftest import llama, make_llama, tokenizer  # noqa: F401
