"""The sandbox as a server, and its clients."""
