"""Metrics, weights and gates → scores with credit spans."""
