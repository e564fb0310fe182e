"""Simulated users: a model that plays one, scripts, personas, and what is wrong with what they say."""
