"""The table of models: base, proactive, trained."""
