"""Triton kernels of the engine's GPU path; checked without a GPU by Triton's interpreter."""
