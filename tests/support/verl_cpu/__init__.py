"""verl on the CPU of this machine alone: what stands in for GPUs in the tests of cluster mode, and on a laptop."""
