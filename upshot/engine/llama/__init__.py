"""The Llama block as the engine computes it: joined projections, merged adapters, fused steps."""
