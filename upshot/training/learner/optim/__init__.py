"""AdamW with float32 masters, its 8-bit form, and its sharded one."""
