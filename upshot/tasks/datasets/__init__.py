"""Rows, records and examples out of files: tables, JSONL, parquet, the originals' formats."""
