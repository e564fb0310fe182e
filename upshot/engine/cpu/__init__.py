"""The engine's runner for CPUs: plain PyTorch, with keys and values in pages and in a dense window."""
