"""Right or wrong: verifiers found by data source."""
