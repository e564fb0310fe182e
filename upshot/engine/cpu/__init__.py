"""The engine on a CPU: a window of keys and values, gathered from pages."""
