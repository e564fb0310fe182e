"""What stands between a call and a model elsewhere: limits, budget, cache, retries, replicas, counts."""
