"""One file a method: rl, ppo, sft, dpo, online dpo; and what they share."""
