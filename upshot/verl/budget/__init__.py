"""One budget and one set of limits for all workers of a cluster."""
