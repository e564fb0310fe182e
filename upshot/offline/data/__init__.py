"""Data: prepare (files or the Hub → parquet for sft, rl, dpo) and build (simulate conversations → a dataset)."""
