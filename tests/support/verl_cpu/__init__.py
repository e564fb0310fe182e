"""verl on this machine's CPU only: stand-ins for GPUs in the tests of cluster mode, and on a laptop."""
