"""Model servers that start, are watched and stop together. `upshot serve FILE.yaml`."""
