"""`upshot serve FILE.yaml`: model servers that are started, watched and stopped together."""
