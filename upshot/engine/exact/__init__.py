"""Exact mode: sampler and learner compute bitwise equal log-probabilities, whatever the batch (`model.exact`).

Both run the model's own forward inside `ExactMode`. It replaces every operation whose rounding depends on the number of
rows (matrix products, sums over a row, attention, on the CPU also exp and the like) by a batch-invariant form. The
backward pass is PyTorch's own: gradients are as accurate as usual, but not batch-invariant.

- `blocks.py`: the forms on the CPU: PyTorch's own operations, always called with the same shapes.
- `kernels/exact.py`: the forms on a GPU.
- `mode.py`: which operation gets which form; operations without one are refused by name.
- `forward.py`: the learner's attention and log-probabilities; `step.py`, `cuda_runner.py`: the engine's steps.
"""
