"""One loop a file: rl, ppo, sft, dpo, online dpo; and what they share. What a method declares is in `methods`."""
