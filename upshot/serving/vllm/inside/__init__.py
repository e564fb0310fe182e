"""Code that runs inside vLLM's own processes, found there by PYTHONPATH: it imports nothing of Upshot.

vLLM may be installed in a separate environment.
"""
