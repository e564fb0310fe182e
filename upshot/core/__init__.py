"""What everything stands on: conversations, scores, files, HTTP, time limits. Imports nothing of the package."""
