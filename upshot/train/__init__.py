"""The learner and its loops: sft, dpo, rl."""
