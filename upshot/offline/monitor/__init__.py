"""How well a reader of thoughts predicts verdicts."""
