"""forward_backward, step, save, load: weights that learn. What is learned is in `objectives`."""
