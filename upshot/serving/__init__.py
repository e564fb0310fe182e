"""Models that serve requests: an OpenAI-compatible server, supervised servers, vLLM, models that take turns."""
