"""The engine's runner for GPUs: steps over paged keys and values, decode steps as CUDA graphs."""
