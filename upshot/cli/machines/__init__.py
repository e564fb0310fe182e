"""Verbs for the services that models and programs run on: servers, pools, sandboxes, caches."""
