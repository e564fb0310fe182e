"""Ways to compute log-probabilities with gradients: padded, packed, and a lean block for the Llama family."""
