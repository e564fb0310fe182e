"""Triton kernels of the learner's GPU path; checked without a GPU by Triton's interpreter."""
