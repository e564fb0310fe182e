"""Runs the same recipes on verl: config, data, the agent loop and estimators. Only `adapters` imports verl."""
