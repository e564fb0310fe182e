"""What runs inside vLLM's own processes, found there by PYTHONPATH: it imports nothing of Upshot.

vLLM may live in an environment of its own.
"""
