"""Ways to get text out of a model: in process, behind an endpoint, at a provider, or scripted."""
