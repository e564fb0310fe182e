"""One file a task: its rows, prompts, environment, verifier and metrics."""
