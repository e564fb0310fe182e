"""Environments from elsewhere: one small adapter a file. What each needs is imported when it is used."""
