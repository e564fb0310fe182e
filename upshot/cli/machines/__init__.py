"""Verbs of what models and programs run on: servers, pools, sandboxes, caches."""
