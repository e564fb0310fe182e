"""Environments of other libraries: one small adapter per file, which imports its library when it is used."""
