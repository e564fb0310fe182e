"""Triton kernels of the learner."""
