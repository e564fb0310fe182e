"""The embedded engine behind the OpenAI API."""
