"""The run folder while verl runs."""
