"""Run folder → web page: curves, conversation trees, reward breakdown."""
