"""Models that answer others: an OpenAI-compatible server, servers watched, vLLM, models that take turns."""
