"""Drivers: from ids to logits with a transformers model's live weights, for Llama-like models block by block.

select.py chooses a driver of driver.py or fused.py; block.py describes the families, linear.py joins projections,
merged.py and lora.py merge adapters, eight_bit.py quantizes projections, agreement.py compares forwards.
"""
