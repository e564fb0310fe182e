"""Exact mode: sampler and learner compute the same log-probabilities, bit for bit, whatever the batch.

Both run the model's own forward inside `ExactMode`, which gives every operation whose rounding depends on the number of
rows (matrix products, sums over a row, attention, on the CPU also exp and its like) a form that does not. The backward
pass is PyTorch's own: gradients are as good as ever, but not batch-invariant.

- `blocks.py`: the forms on the CPU: PyTorch's own operations, always called with the same shapes.
- `kernels/exact.py`: the forms on a GPU.
- `mode.py`: which operation gets which form; what has none is refused by name.
- `forward.py`: the learner's attention and log-probabilities; `step.py`, `cuda_runner.py`: the engine's steps.
"""
