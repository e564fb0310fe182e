"""Tasks in which user and policy both act: one file per domain."""
